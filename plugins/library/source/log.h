// Messages, through the logger of the TensorRT that loaded this library; on stderr where that is not known.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace localattn {

using Severity = nvinfer1::ILogger::Severity;

void useLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;
void say(Severity severity, std::string const& text) noexcept;
// A text that was said before is not said again: TensorRT asks the same question of every copy of a plugin.
void sayOnce(Severity severity, std::string const& text) noexcept;

}  // namespace localattn
