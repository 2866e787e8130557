// The creators, one an op type, and the two functions by which TensorRT finds them. Nothing of TensorRT is called, so
// that this library links none of it.
#include "log.h"
#include "tensorrt/plugin.h"
#include "report.h"
#include "tensorrt/ring_plugin.h"

#include <deque>
#include <exception>
#include <vector>

namespace localattn {
namespace {

// `Kind` is the table's row of an op type, `Values` its attributes, `Plugin` the class of its plugins.
template <typename Kind, typename Values, typename Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(Kind const& opType) : mOpType(opType), mFields(mNames.fields(opType)) {
    for (nvinfer1::PluginField& field : mFields) {
      field.data = nullptr;
    }
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
  }
  Creator(Creator const&) = delete;
  Creator& operator=(Creator const&) = delete;

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    try {
      Values attributes;
      std::string why = "no attributes";
      if (fields == nullptr || !attributes.read(mOpType, *fields, why)) {
        std::string const node = name != nullptr && name[0] != '\0' ? std::string(" of node ") + name : "";
        say(Severity::kERROR, std::string(mOpType.name) + node + ": " + why);
        return nullptr;
      }
      return new Plugin(mOpType, attributes);
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
  Values const mNames{};
  Kind const& mOpType;
  std::vector<nvinfer1::PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

using WindowCreator = Creator<OpType, Attributes, WindowedAttention>;
using RingCreator = Creator<RingOpType, RingAttributes, RingAttention>;

}  // namespace
}  // namespace localattn

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& nbCreators) {
  static std::deque<localattn::WindowCreator> creators;
  static std::deque<localattn::RingCreator> ringCreators;
  static std::vector<nvinfer1::IPluginCreatorInterface*> const list = [] {
    std::vector<nvinfer1::IPluginCreatorInterface*> all;
    for (localattn::OpType const& opType : localattn::opTypes()) {
      all.push_back(&creators.emplace_back(opType));
    }
    for (localattn::RingOpType const& opType : localattn::ringOpTypes()) {
      all.push_back(&ringCreators.emplace_back(opType));
    }
    return all;
  }();
  nbCreators = static_cast<int32_t>(list.size());
  localattn::noteRegistration();
  return list.data();
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  localattn::useLoggerFinder(finder);
}
