// What `kernels.inl` needs, included before the instructions of a set are turned on: inline functions of these headers
// may be the ones that are kept for all files, and then have to run on every processor.
#pragma once

#include "kernels/half.h"
#include "instructions/instructions.h"
#include "kernels/scratch.h"
#include "kernels/tasks.h"
#include "kernels/attention/window.h"

#include <cmath>
#include <cstring>
#include <utility>
