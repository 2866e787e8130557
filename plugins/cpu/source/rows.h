// What a task consists of: some queries of one head, and who can compute them.
#pragma once

#include "attention.h"

namespace localattn {

// Queries [first, end) of one head of one batch entry.
struct Rows {
  int64_t batch;
  int64_t head;
  int64_t first;
  int64_t end;

  // In elements, where the head's row 0 lies in query, key, value and output.
  int64_t origin(const Call& call) const { return batch * call.layout.batch + head * call.layout.head; }
};

// By the definition, in double. Allocates nothing.
void attend_rows_naive(const Call& call, const Rows& rows);

}  // namespace localattn
