// IEEE 754 binary16 to and from float, bit for bit what processors do (rounding to nearest, ties to even).
#pragma once

#include <cstdint>
#include <cstring>

namespace localattn {

inline float widen(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {  // infinity and NaN; a signalling NaN becomes quiet
    bits = 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
  } else if (magnitude >= 0x400u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {  // a subnormal is a whole number of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, sizeof bits);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (bits >= 0x38800000u) {
    bits += 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | (bits - (112u << 23)) >> 13);
  }
  // Subnormal: adding a half makes the addition itself round to a whole number of 2^-24.
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  magnitude += 0.5f;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
}

}  // namespace localattn
