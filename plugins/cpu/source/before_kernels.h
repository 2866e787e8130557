// What `kernels.inl` needs, included before the instructions of a set are turned on: inline functions of these headers
// may be the ones that are kept for all files, and then have to run on every processor.
#pragma once

#include "half.h"
#include "instructions.h"
#include "scratch.h"
#include "tasks.h"
#include "window.h"

#include <cmath>
#include <cstring>
#include <utility>
