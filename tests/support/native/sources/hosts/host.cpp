// A host of TensorRT that is given plugin libraries: opens its backend as servers open theirs, and does what it is
// told. Prints the number of creators that TensorRT knows, after each step.
//
//   host BACKEND STEP...     STEP: start | open:LIBRARY | load:LIBRARY (by the registry)
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  void* const backend = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (backend == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  auto const creators = reinterpret_cast<int32_t (*)()>(dlsym(backend, "creators"));
  auto const start = reinterpret_cast<bool (*)()>(dlsym(backend, "start"));
  auto const load = reinterpret_cast<bool (*)(char const*)>(dlsym(backend, "load"));
  for (int i = 2; i < argc; ++i) {
    bool good = true;
    if (std::strncmp(argv[i], "open:", 5) == 0) {
      good = dlopen(argv[i] + 5, RTLD_LAZY) != nullptr;
    } else if (std::strncmp(argv[i], "load:", 5) == 0) {
      good = load(argv[i] + 5);
    } else {
      good = start();
    }
    if (!good) {
      std::fprintf(stderr, "%s failed\n", argv[i]);
    }
    std::printf("%d\n", creators());
  }
  return 0;
}
