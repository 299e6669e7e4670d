// Integer, logic and shift operations. test_execute.py compares the results of their machine code
// with those of operations_on_host.cu.
//
//     nvcc -cubin -arch=sm_90 operations.cu -o operations.cubin
//     cuobjdump -sass operations.cubin | tr -s " \t" " " > operations_sm_90.sass

using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

// One word per operation and thread.
extern "C" __global__ void kernel(u64* out, u64 key, u32 count) {
  const u32 t = threadIdx.x;
  const u32 a = t * 0x9E3779B1u + static_cast<u32>(key);
  const u32 b = (a >> 7) * 0x85EBCA6Bu ^ static_cast<u32>(key >> 32);
  const u64 wide = static_cast<u64>(a) << 32 | b;
  const u64 other = key * (2 * t + 1);
  const i32 x = static_cast<i32>(a), y = static_cast<i32>(b);
  const u32 by = t * 3 + count;
  u32 at = 0;
  auto keep = [&](u64 value) { out[64 * at++ + t] = value; };

  keep(a + b);
  keep(a - b);
  keep(a + b - t + 17);
  keep(wide + other);
  keep(wide - other);
  keep(a * b);
  keep(static_cast<u64>(a) * b);
  keep(static_cast<u64>(static_cast<i64>(x) * y));
  keep(__umulhi(a, b));
  keep(static_cast<u32>(__mulhi(x, y)));
  keep(wide * other);
  keep(static_cast<u64>(a) * b + other);
  keep(a / 7);
  keep(static_cast<u32>(x / 7));
  keep(a % 100);
  keep(a / (by + 1));
  keep(b % (by + 1));
  keep(static_cast<u32>(x / (static_cast<i32>(by) - 9 | 1)));
  keep(static_cast<u32>(y % (static_cast<i32>(by) - 9 | 1)));
  keep(wide / (other >> 20));
  keep(other % (wide >> 9));
  keep(wide / (other >> 33 | 1));
  keep(static_cast<u64>(static_cast<i64>(wide) / (static_cast<i64>(other) >> 21)));
  keep(a << (by & 31));
  keep(a >> (by & 31));
  keep(static_cast<u32>(x >> (by & 31)));
  keep(by < 32 ? a << by : 0);
  keep(wide << (by & 63));
  keep(wide >> (by & 63));
  keep(static_cast<u64>(static_cast<i64>(wide) >> (by & 63)));
  keep(__funnelshift_l(a, b, by));
  keep(__funnelshift_r(a, b, by));
  keep((a & b) | (~a & by));
  keep(a ^ b ^ by);
  keep(a & ~b);
  keep(wide & other);
  keep(a < b ? 1 : 2);
  keep(x < y ? a : b);
  keep(wide < other ? 1 : 2);
  keep(static_cast<i64>(wide) < static_cast<i64>(other) ? 1 : 2);
  keep((a < b) != (x < y) ? 3 : 4);
  keep((a < b && x >= y) || by == 9 ? 5 : 6);
  keep(min(a, b));
  keep(max(a, b));
  keep(static_cast<u32>(min(x, y)));
  keep(static_cast<u32>(max(x, y)));
  keep(static_cast<u32>(min(x + 5, y)));
  keep(static_cast<u32>(max(x - y, y)));
  keep(__popc(a));
  keep(__byte_perm(a, b, 0x5042));
  keep(__byte_perm(a, b, by & 0x7777));
  keep(static_cast<u32>(abs(x)));
  keep((a + (b << 3)) + 1);
  keep(key + (static_cast<i64>(y) << 2));
  keep(a & 0xff);
  keep(a >> 8 & 0xffff);
  keep(static_cast<u32>(static_cast<signed char>(a)));
  keep(__ballot_sync(0xffffffffu, a & 1));
  keep(__any_sync(0xffffffffu, t == 40) ? 1 : 2);
  keep(__all_sync(0xffffffffu, t < 40) ? 1 : 2);
  keep(__float_as_uint(static_cast<float>(a)));
  keep(__float_as_uint(static_cast<float>(x)));
  keep(static_cast<float>(a) < static_cast<float>(b) ? 1 : 2);
  keep(static_cast<float>(x) >= static_cast<float>(y) || by == 6 ? a : b);
  keep(static_cast<u32>(static_cast<i32>(static_cast<float>(x >> 9))));
  u32 sum = 0;
  for (u32 i = 0; i < count + t % 3; ++i) sum = sum * 31 + i;
  keep(sum);
}
