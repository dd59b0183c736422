"""What CUDA and CuPy's headers give a kernel, for a compiler of the host.

It includes next to nothing: the headers of the C++ library take longer than a kernel does.
"""

HEADER = r"""
#include <stddef.h>
#include <stdint.h>

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

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI 3.14159265358979323846
#define _MATH_1(NAME)                                                                    \
  extern "C" double NAME(double);                                                        \
  extern "C" float NAME##f(float);                                                       \
  static inline float NAME(float v) { return NAME##f(v); }                               \
  static inline double NAME(int v) { return NAME((double)v); }                           \
  static inline double NAME(long long v) { return NAME((double)v); }
#define _MATH_2(NAME)                                                                    \
  extern "C" double NAME(double, double);                                                \
  extern "C" float NAME##f(float, float);                                                \
  static inline float NAME(float a, float b) { return NAME##f(a, b); }                   \
  static inline double NAME(float a, double b) { return NAME((double)a, b); }            \
  static inline double NAME(double a, float b) { return NAME(a, (double)b); }            \
  static inline float NAME(float a, int b) { return NAME##f(a, (float)b); }              \
  static inline double NAME(double a, int b) { return NAME(a, (double)b); }              \
  static inline double NAME(int a, double b) { return NAME((double)a, b); }
_MATH_1(sqrt) _MATH_1(cbrt) _MATH_1(exp) _MATH_1(exp2) _MATH_1(expm1) _MATH_1(log) _MATH_1(log2)
_MATH_1(log10) _MATH_1(log1p) _MATH_1(sin) _MATH_1(cos) _MATH_1(tan) _MATH_1(asin) _MATH_1(acos)
_MATH_1(atan) _MATH_1(sinh) _MATH_1(cosh) _MATH_1(tanh) _MATH_1(asinh) _MATH_1(acosh)
_MATH_1(atanh) _MATH_1(erf) _MATH_1(erfc) _MATH_1(floor) _MATH_1(ceil) _MATH_1(trunc) _MATH_1(rint)
_MATH_1(nearbyint) _MATH_1(round) _MATH_1(fabs)
_MATH_2(pow) _MATH_2(fmod) _MATH_2(atan2) _MATH_2(copysign) _MATH_2(fmin) _MATH_2(fmax)
_MATH_2(hypot)
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float abs(float v) { return fabsf(v); }
static inline double abs(double v) { return fabs(v); }
static inline int abs(int v) { return v < 0 ? -v : v; }
static inline long long abs(long long v) { return v < 0 ? -v : v; }
template <typename T> static inline bool isnan(T v) { return __builtin_isnan(+v); }
template <typename T> static inline bool isinf(T v) { return __builtin_isinf(+v); }
template <typename T> static inline bool isfinite(T v) { return __builtin_isfinite(+v); }
template <typename T> static inline bool signbit(T v) { return __builtin_signbit(+v); }

// To the nearest, ties to even. A double becomes a half by way of a float whose last bit says
// whether anything was cut off, so that it is rounded once.
static inline uint32_t _bits(float v) { uint32_t b; __builtin_memcpy(&b, &v, 4); return b; }
static inline float _of_bits(uint32_t b) { float v; __builtin_memcpy(&v, &b, 4); return v; }
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

template <typename A, typename B> static inline auto min(A a, B b) -> decltype(true ? A() : B()) {
  return (b < a || a != a) ? b : a;
}
template <typename A, typename B> static inline auto max(A a, B b) -> decltype(true ? A() : B()) {
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
