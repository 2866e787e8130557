// Messages, through the logger of the TensorRT that loaded this library; on stderr where that is not known.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace localattn {

using Severity = nvinfer1::ILogger::Severity;

void useLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;
void say(Severity severity, std::string const& text) noexcept;
// Each text is logged only once: TensorRT asks every copy of a plugin the same question.
void sayOnce(Severity severity, std::string const& text) noexcept;

}  // namespace localattn
