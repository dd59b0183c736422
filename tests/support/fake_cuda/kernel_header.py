"""What CUDA and CuPy's headers give a kernel, for a compiler of the host."""

HEADER = r"""
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CUPY_FOR(i, n) for (ptrdiff_t i = 0; i < (n); ++i)

struct _Dim3 { unsigned int x, y, z; };
static thread_local _Dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1},
    gridDim{1, 1, 1};
static const int warpSize = 32;

// To the nearest, ties to even. A double becomes a half by way of a float whose last bit says
// whether anything was cut off, so that it is rounded once.
static inline uint32_t _bits(float v) { uint32_t b; memcpy(&b, &v, 4); return b; }
static inline float _of_bits(uint32_t b) { float v; memcpy(&v, &b, 4); return v; }
static inline float _to_odd(double v) {
  float f = (float)v;
  if ((double)f == v || isnan(v) || isinf(f)) return f;
  uint32_t b = _bits(f);
  if (fabs((double)f) > fabs(v)) --b;
  return _of_bits(b | 1);
}
static inline uint16_t _half_bits(float v) {
  uint32_t b = _bits(v), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | 0x7e00u;
  if (a >= 0x47800000u) return sign | 0x7c00u;
  if (a < 0x38800000u) {  // below the least normal number: as many units of 2^-24
    float units = _of_bits(a) * 16777216.0f;
    return sign | (uint16_t)nearbyintf(units);
  }
  uint32_t odd = (a >> 13) & 1u;
  return sign | (uint16_t)((a - 0x38000000u + 0xfffu + odd) >> 13);
}
static inline float _half_value(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
  if (e == 31) return _of_bits(sign | 0x7f800000u | (m << 13));
  if (e == 0) return _of_bits(sign | _bits((float)m / 16777216.0f));
  return _of_bits(sign | ((e + 112u) << 23) | (m << 13));
}
static inline uint16_t _brain_bits(float v) {
  uint32_t b = _bits(v);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
static inline float _brain_value(uint16_t h) { return _of_bits((uint32_t)h << 16); }

#define _SMALL_FLOAT(NAME, TO, FROM, OF_DOUBLE)                                          \
  class NAME {                                                                           \
    uint16_t data_;                                                                      \
   public:                                                                               \
    NAME() {}                                                                            \
    NAME(float v) : data_(TO(v)) {}                                                      \
    explicit NAME(double v) : data_(TO(OF_DOUBLE(v))) {}                                 \
    explicit NAME(bool v) : data_(TO((float)v)) {}                                       \
    explicit NAME(int v) : data_(TO((float)v)) {}                                        \
    explicit NAME(unsigned int v) : data_(TO((float)v)) {}                               \
    explicit NAME(long long v) : data_(TO((float)v)) {}                                  \
    explicit NAME(unsigned long long v) : data_(TO((float)v)) {}                         \
    operator float() const { return FROM(data_); }                                       \
    NAME& operator=(const NAME&) = default;                                              \
    NAME(const NAME&) = default;                                                         \
    template <typename T> NAME& operator=(const T& v) { return *this = static_cast<NAME>(v); } \
    template <typename T> NAME& operator+=(const T& v) { return *this = *this + v; }     \
    template <typename T> NAME& operator-=(const T& v) { return *this = *this - v; }     \
    template <typename T> NAME& operator*=(const T& v) { return *this = *this * v; }     \
    template <typename T> NAME& operator/=(const T& v) { return *this = *this / v; }     \
    unsigned short to_bits() const { return data_; }                                     \
    static NAME from_bits(unsigned short b) { NAME v; v.data_ = b; return v; }           \
  };
_SMALL_FLOAT(float16, _half_bits, _half_value, _to_odd)
// CuPy rounds a double twice here.
_SMALL_FLOAT(bfloat16, _brain_bits, _brain_value, (float))

template <typename A, typename B> static inline typename std::common_type<A, B>::type min(
    A a, B b) {
  return (b < a || a != a) ? b : a;
}
template <typename A, typename B> static inline typename std::common_type<A, B>::type max(
    A a, B b) {
  return (a < b || a != a) ? b : a;
}
static inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
static inline double rsqrt(double v) { return 1.0 / sqrt(v); }
static inline float rsqrt(float v) { return rsqrtf(v); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline int __float_as_int(float v) { return (int)_bits(v); }
static inline unsigned int __float_as_uint(float v) { return _bits(v); }
static inline float __int_as_float(int v) { return _of_bits((uint32_t)v); }
static inline float __uint_as_float(unsigned int v) { return _of_bits(v); }
static inline int __float2int_rn(float v) { return (int)nearbyintf(v); }
template <typename T> static inline T __ldg(const T* p) { return *p; }
#define _ATOMIC(NAME, NEW)                                          \
  template <typename T> static inline T NAME(T* p, T v) {           \
    T old = *p;                                                     \
    *p = NEW;                                                       \
    return old;                                                     \
  }
_ATOMIC(atomicAdd, old + v)
_ATOMIC(atomicMax, max(old, v))
_ATOMIC(atomicMin, min(old, v))
_ATOMIC(atomicOr, old | v)
_ATOMIC(atomicExch, v)

// An array of a kernel, made of: address, number of elements, sizes, strides in bytes.
template <typename T, int _ndim> class CArray {
  const long long* at_;
 public:
  static const int ndim = _ndim;
  CArray(const void* at) : at_((const long long*)at) {}
  ptrdiff_t size() const { return at_[1]; }
  const long long* shape() const { return at_ + 2; }
  const long long* strides() const { return at_ + 2 + _ndim; }
  T& operator[](ptrdiff_t i) const {
    char* p = (char*)at_[0];
    for (int d = _ndim - 1; d >= 0; --d) {
      p += (i % shape()[d]) * strides()[d];
      i /= shape()[d];
    }
    return *(T*)p;
  }
  template <typename I> T& operator[](const I (&index)[_ndim ? _ndim : 1]) const {
    char* p = (char*)at_[0];
    for (int d = 0; d < _ndim; ++d) p += index[d] * strides()[d];
    return *(T*)p;
  }
};
class CIndexer {
  ptrdiff_t size_, i_;
 public:
  CIndexer(ptrdiff_t size) : size_(size), i_(0) {}
  ptrdiff_t size() const { return size_; }
  void set(ptrdiff_t i) { i_ = i; }
  ptrdiff_t get() const { return i_; }
};
"""
