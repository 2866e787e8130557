// A task: some queries of one head, and the functions that can compute them.
#pragma once

#include "kernels/attention/attention.h"

namespace localattn {

// Queries [first, end) of one head of one batch entry.
struct Rows {
  int64_t batch;
  int64_t head;
  int64_t first;
  int64_t end;

  // In elements, where row 0 of the head lies in query and output, and that of its keys in key and value.
  int64_t origin(const Call& call) const { return batch * call.layout.batch + head * call.layout.head; }
  int64_t key_origin(const Call& call) const {
    return batch * call.key_layout.batch + head / (call.heads / call.kv_heads) * call.key_layout.head;
  }
};

// By the definition, in double. Allocates nothing.
void attend_rows_naive(const Call& call, const Rows& rows);

}  // namespace localattn
