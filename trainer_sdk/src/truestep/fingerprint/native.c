/* The three sums of truestep.fingerprint over contiguous memory (definition: reference.py), and a look for NaN and Inf:
   each alone, and both in one pass. No alignment is assumed. */

#include <stdint.h>
#include <string.h>

#define KEY 0x9E3779B97F4A7C15ULL
#define FMIX_1 0xFF51AFD7ED558CCDULL
#define FMIX_2 0xC4CEB9FE1A85EC53ULL

#define BLOCK_PAIRS 64
#define LINE_BYTES 64
#define AHEAD_BYTES 4096

static inline uint64_t fmix64(uint64_t value) {
    value ^= value >> 33;
    value *= FMIX_1;
    value ^= value >> 33;
    value *= FMIX_2;
    return value ^ (value >> 33);
}

typedef struct {
    uint64_t plain, high, weighted, mix;
} sums_t;

/* Words 2k and 2k+1 of pair k weigh 2k+1 and 2k+2: (2k+1) * (low + high) + high. */
static inline void add_pair(sums_t *sums, uint64_t pair, uint64_t k) {
    uint64_t high = pair >> 32, both = (pair & 0xFFFFFFFFULL) + high;
    sums->plain += both;
    sums->high += high;
    sums->weighted += both * (2 * k + 1);
    sums->mix += fmix64(pair ^ (k + 1) * KEY);
}

static inline void close_sums(const sums_t *sums, int64_t *results) {
    results[0] = (int64_t)sums->plain;
    results[1] = (int64_t)(sums->weighted + sums->high);
    results[2] = (int64_t)sums->mix;
}

/* What an element of a format has, repeated to 64 bits: the bits that NaN and Inf have set, every bit below the sign, and
   the sign. `exponent` leaves out the sign, so adding `below` to what is missing of it carries into the sign of the same
   element where something is missing, and never beyond. */
typedef struct {
    uint64_t exponent, below, sign;
} format_t;

static inline uint64_t finite(uint64_t pair, format_t format) {
    return ((~pair & format.exponent) + format.below) & format.sign;
}

/* The processor alone fetches no further than the page it is in, and the sums keep it too busy to wait for one line while
   it works on others: without this a pass over memory that no cache holds takes three times as long. Fetching beyond the
   end is harmless. */
static inline void fetch(const unsigned char *address, uint64_t bytes) {
    for (uint64_t offset = 0; offset < bytes; offset += LINE_BYTES)
        __builtin_prefetch(address + offset);
}

/* BODY with `pair` and `k` for every 8 bytes; the tail's missing bytes are zeros. */
#define EACH_PAIR(BODY)                                                                       \
    do {                                                                                      \
        uint64_t whole = length / 8, pair, k = 0;                                             \
        while (k + BLOCK_PAIRS <= whole) {                                                    \
            fetch(data + 8 * k + AHEAD_BYTES, 8 * BLOCK_PAIRS);                               \
            for (uint64_t end = k + BLOCK_PAIRS; k < end; k++) {                              \
                memcpy(&pair, data + 8 * k, 8);                                               \
                BODY;                                                                         \
            }                                                                                 \
        }                                                                                     \
        for (; k < whole; k++) {                                                              \
            memcpy(&pair, data + 8 * k, 8);                                                   \
            BODY;                                                                             \
        }                                                                                     \
        if (length % 8) {                                                                     \
            pair = 0;                                                                         \
            memcpy(&pair, data + 8 * k, length % 8);                                          \
            BODY;                                                                             \
        }                                                                                     \
    } while (0)

/* results: three a tensor (plain, position, mix), without the length that Fingerprint.from_sums adds. */
void truestep_sums(uint64_t count, const unsigned char *const *tensors, const uint64_t *lengths, int64_t *results) {
    for (uint64_t index = 0; index < count; index++) {
        const unsigned char *data = tensors[index];
        uint64_t length = lengths[index];
        sums_t sums = {0, 0, 0, 0};
        if (index + 1 < count)
            fetch(tensors[index + 1], lengths[index + 1] < AHEAD_BYTES ? lengths[index + 1] : AHEAD_BYTES);
        EACH_PAIR(add_pair(&sums, pair, k));
        close_sums(&sums, results + 3 * index);
    }
}

/* Whether an element is NaN or Inf. */
int truestep_nonfinite(const unsigned char *data, uint64_t length, const format_t *given) {
    format_t format = *given;
    uint64_t all = format.sign;
    EACH_PAIR(all &= finite(pair, format));
    return all != format.sign;
}

/* Both of the above, of one tensor. */
int truestep_look(const unsigned char *data, uint64_t length, const format_t *given, int64_t *results) {
    sums_t sums = {0, 0, 0, 0};
    format_t format = *given;
    uint64_t all = format.sign;
    EACH_PAIR(add_pair(&sums, pair, k); all &= finite(pair, format));
    close_sums(&sums, results);
    return all != format.sign;
}
