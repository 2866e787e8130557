// TensorRT's library of plugins, without plugins: the one function that its Python bindings link to.
extern "C" bool initLibNvInferPlugins(void*, char const*) { return true; }
