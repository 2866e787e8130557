// Drives a plugin library as TensorRT does, and prints what happened as JSON: its creators; a plugin made from fields
// given on the command line; that plugin's serialised fields, and a second one made from them, cloned and attached,
// which is told its shapes and launched twice.
//
//   drive LIBRARY OP_TYPE DTYPE SHAPE [FIELD=INT,INT|FIELD=FLOATf ...]
//
// DRIVE_THREAD: it is launched by a thread of its own.
// DRIVE_SHIFT: "name=bytes": where the last launch finds "query", "key", "value" or the output too late by that much.
// DRIVE_KV_HEADS: heads of key and value.
// DRIVE_BIAS: the shape of AFT-local's biases.
// DRIVE_INPUTS: types and shapes of all inputs, "fp16:1,2,1,64;fp32:1,9;int64:9".
// DRIVE_PROFILE: the largest shape of query, key and value in the profile.
// DRIVE_TENSORRT: a library whose function `finder` returns the ILoggerFinder to give to the plugin library.
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

using namespace nvinfer1;

namespace {

struct Fields {
  std::deque<std::string> names;
  std::deque<std::vector<int32_t>> integers;
  std::deque<float> floats;
  std::vector<PluginField> fields;

  void add(std::string const& text) {
    size_t const equals = text.find('=');
    names.push_back(text.substr(0, equals));
    std::string const value = text.substr(equals + 1);
    if (value.back() == 'f') {
      floats.push_back(std::strtof(value.c_str(), nullptr));
      fields.emplace_back(names.back().c_str(), &floats.back(), PluginFieldType::kFLOAT32, 1);
      return;
    }
    integers.emplace_back();
    std::stringstream parts(value);
    for (std::string part; std::getline(parts, part, ',');) {
      integers.back().push_back(std::atoi(part.c_str()));
    }
    fields.emplace_back(names.back().c_str(), integers.back().data(), PluginFieldType::kINT32,
                        static_cast<int32_t>(integers.back().size()));
  }
};

void printFields(PluginFieldCollection const& collection) {
  std::printf("\"fields\": {");
  for (int32_t i = 0; i < collection.nbFields; ++i) {
    PluginField const& field = collection.fields[i];
    std::printf("%s\"%s\": [", i != 0 ? ", " : "", field.name);
    for (int32_t k = 0; k < field.length; ++k) {
      std::printf(k != 0 ? ", " : "");
      if (field.type == PluginFieldType::kFLOAT32) {
        std::printf("%.9g", static_cast<double>(static_cast<float const*>(field.data)[k]));
      } else {
        std::printf("%d", static_cast<int32_t const*>(field.data)[k]);
      }
    }
    std::printf("]");
  }
  std::printf("}, ");
}

DataType typeCalled(std::string const& name) {
  return name == "int64"  ? DataType::kINT64
         : name == "fp16" ? DataType::kHALF
         : name == "bf16" ? DataType::kBF16
         : name == "fp8"  ? DataType::kFP8
                          : DataType::kFLOAT;
}

PluginTensorDesc describe(DataType type, std::vector<int64_t> const& sizes) {
  PluginTensorDesc desc{};
  desc.type = type;
  desc.format = TensorFormat::kLINEAR;
  desc.dims.nbDims = static_cast<int32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    desc.dims.d[i] = sizes[i];
  }
  return desc;
}

std::vector<int64_t> sizesOf(char const* text) {
  std::vector<int64_t> sizes;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    sizes.push_back(std::atoll(part.c_str()));
  }
  return sizes;
}

int32_t of(Fields const& fields, char const* name, size_t index = 0) {
  int32_t found = 0;
  size_t next = 0;
  for (PluginField const& field : fields.fields) {
    if (field.type == PluginFieldType::kINT32 && std::strcmp(field.name, name) == 0) {
      found = fields.integers[next][index];
    }
    next += field.type == PluginFieldType::kINT32 ? 1 : 0;
  }
  return found;
}

std::vector<PluginTensorDesc> inputsOf(std::string const& opType, DataType type, std::vector<int64_t> const& shape,
                                       Fields const& fields) {
  if (char const* given = std::getenv("DRIVE_INPUTS")) {
    std::vector<PluginTensorDesc> all;
    std::stringstream parts(given);
    for (std::string part; std::getline(parts, part, ';');) {
      size_t const colon = part.find(':');
      all.push_back(describe(typeCalled(part.substr(0, colon)), sizesOf(part.c_str() + colon + 1)));
    }
    return all;
  }
  std::vector<PluginTensorDesc> inputs(3, describe(type, shape));
  if (opType.find("AFTLocal") == 0) {
    inputs.push_back(describe(type, sizesOf(std::getenv("DRIVE_BIAS"))));
    if (opType.find("Mask") != std::string::npos) {
      inputs.push_back(describe(DataType::kBOOL, {shape[1], shape[0]}));
    }
    return inputs;
  }
  bool const sequenceFirst = of(fields, "perm", 1) == 2;
  if (char const* heads = std::getenv("DRIVE_KV_HEADS")) {
    inputs[1].dims.d[sequenceFirst ? 2 : 1] = inputs[2].dims.d[sequenceFirst ? 2 : 1] = std::atoi(heads);
  }
  if (opType.find("Mask") != std::string::npos) {
    inputs.push_back(describe(DataType::kBOOL, {shape[0], shape[sequenceFirst ? 1 : 2]}));
  }
  if (opType.find("Bias") != std::string::npos) {
    int64_t const window = of(fields, "window_size");
    int64_t const keys = window * (of(fields, "look_backward") + 1 + of(fields, "look_forward"));
    inputs.push_back(describe(type, {shape[sequenceFirst ? 2 : 1], window, keys}));
  }
  if (opType.find("Sinks") != std::string::npos) {
    inputs.push_back(describe(type, {shape[sequenceFirst ? 2 : 1]}));
  }
  return inputs;
}

IPluginCreatorV3One* creatorCalled(void* library, std::string const& opType) {
  auto const getCreators =
      reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = getCreators(count);
  IPluginCreatorV3One* found = nullptr;
  std::printf("{\"creators\": [");
  for (int32_t i = 0; i < count; ++i) {
    auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    std::printf("%s[\"%s\", \"%s\", \"%s\", \"%s\"]", i != 0 ? ", " : "", creator->getPluginName(),
                creator->getPluginVersion(), creator->getPluginNamespace(), creator->getInterfaceInfo().kind);
    found = creator->getPluginName() == opType ? creator : found;
  }
  std::printf("], ");
  return found;
}

void run(IPluginV3* plugin, std::vector<PluginTensorDesc> const& inputs) {
  auto* build = static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
  auto* runtime = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  std::vector<DynamicPluginTensorDesc> all;
  for (PluginTensorDesc const& desc : inputs) {
    all.push_back(DynamicPluginTensorDesc{desc, desc.dims, desc.dims, desc.dims});
  }
  if (char const* largest = std::getenv("DRIVE_PROFILE")) {
    for (size_t i = 0; i < 3; ++i) {
      all[i].max = describe(inputs[0].type, sizesOf(largest)).dims;
    }
  }
  all.push_back(all[0]);
  int32_t const outputs = build->getNbOutputs();
  for (int32_t i = 1; i < outputs; ++i) {
    all.push_back(all[i + 2]);  // the caches of a step
  }
  int32_t const count = static_cast<int32_t>(inputs.size());
  std::vector<DataType> given, written(static_cast<size_t>(outputs));
  for (PluginTensorDesc const& desc : inputs) {
    given.push_back(desc.type);
  }
  build->getOutputDataTypes(written.data(), outputs, given.data(), count);
  all[static_cast<size_t>(count)].desc.type = written[0];
  std::printf("\"supported\": [");
  for (int32_t i = 0; i < count + outputs; ++i) {
    bool const good = build->supportsFormatCombination(i, all.data(), count, outputs);
    std::printf("%s%s", i != 0 ? ", " : "", good ? "true" : "false");
  }
  std::printf("], \"configure\": %d, ", build->configurePlugin(all.data(), count, &all[count], outputs));
  std::printf("\"workspace\": %zu, ", build->getWorkspaceSize(all.data(), count, &all[count], outputs));
  std::printf("\"metadata\": \"%s\", ", build->getMetadataString());

  IPluginV3* attached = static_cast<IPluginV3OneRuntime*>(runtime)->attachToContext(nullptr);
  runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  std::printf("\"shape_change\": %d, ", runtime->onShapeChange(inputs.data(), count, inputs.data(), outputs));
  std::vector<void const*> addresses;
  for (int32_t i = 0; i < count; ++i) {
    addresses.push_back(reinterpret_cast<void const*>(uintptr_t{0x40000000} * (i + 1)));
  }
  void* output[3];
  for (uintptr_t i = 0; i < 3; ++i) {
    output[i] = reinterpret_cast<void*>(uintptr_t{0x900000000} + (i << 24));
  }
  void* const workspace = reinterpret_cast<void*>(uintptr_t{0x800000000});
  cudaStream_t const stream = reinterpret_cast<cudaStream_t>(uintptr_t{0x55});
  auto const launch = [&] {
    return runtime->enqueue(inputs.data(), inputs.data(), addresses.data(), output, workspace, stream);
  };
  auto const launches = [&] {
    std::printf("\"enqueue\": [");
    for (int32_t i = 0; i < 2; ++i) {
      std::printf("%s%d", i != 0 ? ", " : "", launch());
    }
    std::printf("]");
  };
  if (std::getenv("DRIVE_THREAD") != nullptr) {
    std::thread(launches).join();
  } else {
    launches();
  }
  if (char const* shift = std::getenv("DRIVE_SHIFT")) {
    std::string const text = shift;
    std::string const name = text.substr(0, text.find('='));
    uintptr_t const bytes = static_cast<uintptr_t>(std::atoi(text.c_str() + name.size() + 1));
    char const* const names[] = {"query", "key", "value"};
    for (int32_t i = 0; i < 3; ++i) {
      if (name == names[i]) {
        addresses[i] = reinterpret_cast<void const*>(reinterpret_cast<uintptr_t>(addresses[i]) + bytes);
      }
    }
    if (name == "output") {
      output[0] = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(output[0]) + bytes);
    }
    std::printf(", \"shifted\": %d", launch());
  }
  delete attached;
}

}  // namespace

int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (char const* path = std::getenv("DRIVE_TENSORRT")) {
    auto const finder = reinterpret_cast<ILoggerFinder* (*)()>(dlsym(dlopen(path, RTLD_NOW), "finder"));
    reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"))(finder());
  }
  std::string const opType = argc > 2 ? argv[2] : "";
  IPluginCreatorV3One* creator = creatorCalled(library, opType);
  if (creator == nullptr) {
    std::printf("\"created\": false}\n");
    return 0;
  }
  std::vector<int64_t> const shape = sizesOf(argv[4]);
  Fields fields;
  for (int i = 5; i < argc; ++i) {
    fields.add(argv[i]);
  }
  PluginFieldCollection const collection{static_cast<int32_t>(fields.fields.size()), fields.fields.data()};
  auto* first = creator->createPlugin("node", &collection, TensorRTPhase::kBUILD);
  std::printf("\"created\": %s", first != nullptr ? "true" : "false");
  if (first != nullptr) {
    std::printf(", ");
    auto* runtime = static_cast<IPluginV3OneRuntime*>(first->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    printFields(*runtime->getFieldsToSerialize());
    auto* read = creator->createPlugin("node", runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME);
    delete first;
    auto* clone = read->clone();
    delete read;
    run(clone, inputsOf(opType, typeCalled(argv[3]), shape, fields));
    delete clone;
    char loaded[2048] = "";
    auto const kernels = reinterpret_cast<size_t (*)(char*, size_t)>(dlsym(library, "localattn_loaded_kernels"));
    kernels(loaded, sizeof(loaded));
    std::fputs(", \"kernels\": \"", stdout);
    for (char const* at = loaded; *at != '\0'; ++at) {
      std::fputs(*at == '\n' ? "\\n" : std::string(1, *at).c_str(), stdout);
    }
    std::fputs("\"", stdout);
  }
  std::printf("}\n");
  return 0;
}
