/* The three sums of truestep.fingerprint over contiguous memory (definition: reference.py), and a look for NaN and Inf.
   No alignment is assumed. */

#include <stdint.h>
#include <string.h>

#define KEY 0x9E3779B97F4A7C15ULL
#define FMIX_1 0xFF51AFD7ED558CCDULL
#define FMIX_2 0xC4CEB9FE1A85EC53ULL

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

static void one(const unsigned char *data, uint64_t length, int64_t *result) {
    sums_t sums = {0, 0, 0, 0};
    uint64_t whole = length / 8, pair;
    for (uint64_t k = 0; k < whole; k++) {
        memcpy(&pair, data + 8 * k, 8);
        add_pair(&sums, pair, k);
    }
    if (length % 8) {
        pair = 0;
        memcpy(&pair, data + 8 * whole, length % 8);
        add_pair(&sums, pair, whole);
    }
    result[0] = (int64_t)sums.plain;
    result[1] = (int64_t)(sums.weighted + sums.high);
    result[2] = (int64_t)sums.mix;
}

/* results: three a tensor (plain, position, mix), without the length that Fingerprint.from_sums adds. */
void truestep_sums(uint64_t count, const unsigned char *const *data, const uint64_t *lengths, int64_t *results) {
    for (uint64_t index = 0; index < count; index++)
        one(data[index], lengths[index], results + 3 * index);
}

#define NONFINITE(TYPE)                                                                       \
    for (uint64_t index = 0; index < length / sizeof(TYPE); index++) {                        \
        TYPE value;                                                                           \
        memcpy(&value, data + index * sizeof(TYPE), sizeof(TYPE));                            \
        found |= (TYPE)(value & (TYPE)exponent) == (TYPE)exponent;                            \
    }

/* Whether an element of `width` bytes has every bit of `exponent` set, as NaN and Inf have those of their format. */
int truestep_nonfinite(const unsigned char *data, uint64_t length, uint64_t width, uint64_t exponent) {
    int found = 0;
    if (width == 2) NONFINITE(uint16_t)
    if (width == 4) NONFINITE(uint32_t)
    if (width == 8) NONFINITE(uint64_t)
    return found;
}
