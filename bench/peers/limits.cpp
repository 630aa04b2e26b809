// Measures the machine's peak rates: bytes read per second, and multiply-adds per second.
//
// Each thread is pinned to one processor, different cores first, as the engine does (csrc/cpu/runtime/cores.hpp). The first run is a
// warm-up, since an idle processor needs time to reach its clock rate. Each thread has twelve independent accumulators in registers,
// enough to cover the latency of the multiply units, and accesses no memory. The reader streams over a buffer far larger than any
// cache. Prints one line of JSON:
//   {"threads": N, "read_gb_s": .., "bf16_gflop_s": .., "fp32_gflop_s": .., "int8_gop_s": .., "bf16_matrix_gflop_s": ..,
//    "int8_matrix_gop_s": ..}
// Rates an instruction set lacks are 0; without AVX-512, fp32 and int8 are those of AVX2.
//
//   g++ -O3 -std=c++20 -pthread -I../../csrc/cpu limits.cpp ../../csrc/cpu/runtime/cores.cpp -o limits && ./limits 2

#include <cpuid.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "cores.hpp"

namespace {

constexpr int kAccumulators = 12;
constexpr long kIterations = 40'000'000;
constexpr size_t kReadBytes = 1ul << 30;
constexpr int kRepetitions = 4;

std::atomic<long> sink;  // prevents the compiler from removing the computation

__attribute__((target("avx512f,avx512bf16"))) void multiply_bf16() {
    __m512 sums[kAccumulators];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, ones, ones);
    }
    float total = 0;
    for (auto& sum : sums) total += _mm512_reduce_add_ps(sum);
    sink += static_cast<long>(total);
}

__attribute__((target("avx512f"))) void multiply_fp32() {
    __m512 sums[kAccumulators];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    const __m512 one = _mm512_set1_ps(1.0f);
    for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_fmadd_ps(one, one, sum);
    }
    float total = 0;
    for (auto& sum : sums) total += _mm512_reduce_add_ps(sum);
    sink += static_cast<long>(total);
}

__attribute__((target("avx512f,avx512vnni"))) void multiply_int8() {
    __m512i sums[kAccumulators];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, ones, ones);
    }
    long total = 0;
    for (auto& sum : sums) total += _mm512_reduce_add_epi32(sum);
    sink += total;
}

// The matrix unit (AMX): four accumulators of 16 x 16 in registers. Assembly, so that compilers without AMX support can build it.
constexpr long kMatrixIterations = 8'000'000;

struct alignas(64) MatrixShapes {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Returns true if the processor has AMX for bf16 and 8 bits, and Linux grants its registers. Call it before other threads start.
bool has_matrices() {
    unsigned a, b, c, d;
    constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void multiply_bf16_matrices() {
    const MatrixShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    for (long i = 0; i < kMatrixIterations; ++i) {
        asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
                     "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    }
    asm volatile("tilerelease");
}

void multiply_int8_matrices() {
    const MatrixShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    for (long i = 0; i < kMatrixIterations; ++i) {
        asm volatile("tdpbsud %tmm6, %tmm4, %tmm0\n\ttdpbsud %tmm7, %tmm4, %tmm1\n\t"
                     "tdpbsud %tmm6, %tmm5, %tmm2\n\ttdpbsud %tmm7, %tmm5, %tmm3");
    }
    asm volatile("tilerelease");
}

__attribute__((target("avx512f"))) void read_all_avx512(const char* begin, size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_load_si512(begin + i));
        b = _mm512_xor_si512(b, _mm512_load_si512(begin + i + 64));
        c = _mm512_xor_si512(c, _mm512_load_si512(begin + i + 128));
        d = _mm512_xor_si512(d, _mm512_load_si512(begin + i + 192));
    }
    sink += _mm512_reduce_add_epi32(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
}

// The same for processors with vectors of 32 bytes.
__attribute__((target("avx2,fma"))) void multiply_fp32_avx2() {
    __m256 sums[kAccumulators];
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    const __m256 one = _mm256_set1_ps(1.0f);
    for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm256_fmadd_ps(one, one, sum);
    }
    float total = 0;
    for (auto& sum : sums) total += _mm256_cvtss_f32(sum);
    sink += static_cast<long>(total);
}

// Without dot products of bytes: products are added in pairs, then the pairs in pairs, then to the sum.
__attribute__((target("avx2"))) void multiply_int8_avx2() {
    __m256i sums[kAccumulators];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    __m256i bytes = _mm256_set1_epi8(1);
    const __m256i pairs = _mm256_set1_epi16(1);
    for (long i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
        for (auto& sum : sums) {
            asm volatile("" : "+x"(bytes));  // prevents the compiler from hoisting the products
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, bytes), pairs));
        }
    }
    long total = 0;
    for (auto& sum : sums) total += _mm256_extract_epi32(sum, 0);
    sink += total;
}

__attribute__((target("avx2"))) void read_all_avx2(const char* begin, size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 128) {
        a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i*)(begin + i)));
        b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i*)(begin + i + 32)));
        c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i*)(begin + i + 64)));
        d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i*)(begin + i + 96)));
    }
    sink += _mm256_extract_epi32(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}

// Seconds of the fastest of a few runs of `work(thread)` on all threads at once.
double best_seconds(int num_threads, const std::function<void(int)>& work) {
    const std::vector<int> processors = qt::in_order_of_cores(qt::usable_processors(), "/sys");
    double best = 1e30;
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
        const auto began = std::chrono::steady_clock::now();
        std::vector<std::thread> threads;
        for (int i = 0; i < num_threads; ++i) {
            threads.emplace_back([&work, &processors, i] {
                qt::stay_on(processors[i % processors.size()]);
                work(i);
            });
        }
        for (auto& thread : threads) thread.join();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
        if (repetition > 0) best = std::min(best, taken.count());
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const int num_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    __builtin_cpu_init();
    const auto rate = [&](bool supported, void (*work)(), double operations) {
        if (!supported) return 0.0;
        const double seconds = best_seconds(num_threads, [work](int) { work(); });
        return num_threads * operations / seconds / 1e9;
    };
    constexpr double kVectors = double(kIterations) * kAccumulators, kMatrices = double(kMatrixIterations) * 4;
    const bool matrices = has_matrices();
    const double bf16_matrices = rate(matrices, multiply_bf16_matrices, kMatrices * 2 * 16 * 16 * 32);
    const double int8_matrices = rate(matrices, multiply_int8_matrices, kMatrices * 2 * 16 * 16 * 64);
    const bool wide = __builtin_cpu_supports("avx512f");
    const double bf16 = rate(wide && __builtin_cpu_supports("avx512bf16"), multiply_bf16, kVectors * 64);
    const bool half_as_wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const double fp32 =
        wide ? rate(true, multiply_fp32, kVectors * 32) : rate(half_as_wide, multiply_fp32_avx2, kVectors * 16);
    const double int8 = wide && __builtin_cpu_supports("avx512vnni")
                            ? rate(true, multiply_int8, kVectors * 128)
                            : rate(half_as_wide, multiply_int8_avx2, kVectors * 64);
    double read = 0;
    if (wide || half_as_wide) {
        const auto read_all = wide ? read_all_avx512 : read_all_avx2;
        char* buffer = static_cast<char*>(std::aligned_alloc(1 << 21, kReadBytes));
        madvise(buffer, kReadBytes, MADV_HUGEPAGE);  // prefetchers stop at page boundaries
        std::memset(buffer, 1, kReadBytes);
        const size_t share = kReadBytes / num_threads / 256 * 256;
        read = kReadBytes / 1e9 / best_seconds(num_threads, [&](int i) { read_all(buffer + i * share, share); });
        std::free(buffer);
    }
    std::printf(
        "{\"threads\": %d, \"read_gb_s\": %.1f, \"bf16_gflop_s\": %.0f, \"fp32_gflop_s\": %.0f, \"int8_gop_s\": %.0f, "
        "\"bf16_matrix_gflop_s\": %.0f, \"int8_matrix_gop_s\": %.0f}\n",
        num_threads, read, bf16, fp32, int8, bf16_matrices, int8_matrices);
}
