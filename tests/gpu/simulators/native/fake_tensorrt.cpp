// A stand-in for the part of TensorRT that hands a plugin library its logger: `finder` returns an ILoggerFinder laid
// out as in the release VERSION. In TensorRT 11 and TensorRT-RTX 1.7 both classes are IVersionedInterfaces.
#include <cstdint>
#include <cstdio>

namespace {

#ifdef VERSIONED
struct Base {
  virtual int32_t getAPILanguage() const noexcept { return 0; }
  virtual void getInterfaceInfo() const noexcept { std::fprintf(stderr, "wrong function called\n"); }
  virtual ~Base() noexcept = default;
};
#else
struct Base {};
#endif

struct Logger : Base {
  virtual void log(int32_t severity, char const* text) noexcept {
    std::fprintf(stderr, "[logger %d] %s\n", severity, text);
  }
};

struct Finder : Base {
  virtual Logger* findLogger() {
    static Logger logger;
    return &logger;
  }
};

}  // namespace

extern "C" {

int32_t getInferLibVersion() noexcept { return VERSION; }

void* finder() {
  static Finder it;
  return &it;
}

}  // extern "C"
