// All kernels, for one instruction set. Included by its file, inside its namespace, after Vector, kLanes, the sizes of
// tiles, and the two conversions of vectors of fp16.

#include "kernels/vectors.inl"

#include "kernels/attention/tiles.inl"

#include "kernels/fused.inl"

#include "kernels/aft.inl"

#include "kernels/ring.inl"

extern const Functions functions = {
    attend_rows, read_streams, write_streams, write_and_read_streams,
    rotate,      gated,        aft_states,    aft_mean,
    ring_step,   ring_merge,   kRingRows,     ring_biases,
    ring_chunk,
};
