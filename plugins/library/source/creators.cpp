// The creators, one an op type, and the two functions by which TensorRT finds them. Nothing of TensorRT is called, so
// that this library links none of it.
#include "log.h"
#include "plugin.h"
#include "report.h"

#include <exception>

namespace localattn {
namespace {

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(OpType const& opType) : mOpType(opType), mFields(kNAMES_ONLY.fields()) {
    for (nvinfer1::PluginField& field : mFields) {
      field.data = nullptr;
    }
    mCollection = {kFIELD_COUNT, mFields.data()};
  }

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    try {
      Attributes attributes;
      std::string why = "no attributes";
      if (fields == nullptr || !attributes.read(*fields, why)) {
        std::string const node = name != nullptr && name[0] != '\0' ? std::string(" of node ") + name : "";
        say(Severity::kERROR, std::string(mOpType.name) + node + ": " + why);
        return nullptr;
      }
      return new WindowedAttention(mOpType, attributes);
    } catch (std::exception const& error) {
      say(Severity::kERROR, error.what());
      return nullptr;
    }
  }

  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }

  nvinfer1::AsciiChar const* getPluginName() const noexcept override { return mOpType.name; }

  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kPLUGIN_VERSION; }

  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

 private:
  static Attributes const kNAMES_ONLY;

  OpType const& mOpType;
  std::array<nvinfer1::PluginField, kFIELD_COUNT> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

Attributes const Creator::kNAMES_ONLY{};

}  // namespace
}  // namespace localattn

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& nbCreators) {
  using localattn::Creator;
  static constexpr localattn::OpType kOP_TYPES[] = {
      {"WindowedAttention", false, false},
      {"WindowedAttentionMask", true, false},
      {"WindowedAttentionBias", false, true},
      {"WindowedAttentionMaskBias", true, true},
  };
  static Creator creators[] = {Creator(kOP_TYPES[0]), Creator(kOP_TYPES[1]), Creator(kOP_TYPES[2]),
                               Creator(kOP_TYPES[3])};
  static nvinfer1::IPluginCreatorInterface* const list[] = {&creators[0], &creators[1], &creators[2], &creators[3]};
  nbCreators = 4;
  localattn::noteRegistration();
  return list;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  localattn::useLoggerFinder(finder);
}
