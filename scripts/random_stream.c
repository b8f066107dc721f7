// Writes carrywave's random words to standard output, with the coordinates in any order, for test batteries that read 32-bit words.
// An independent implementation, written only from the documented arithmetic of kernels/random.py and data/shuffle.py.
//
//     random_stream FUNCTION COORDINATES ORDER PART [WORDS] <KEYS >STREAM        (random_stream.py names the orders and supplies the keys)
//
// FUNCTION     keyed: `bits` of kernels/random.py, after a `fold`, which absorbs as `bits` does; order: `draw_words` of data/shuffle.py
// COORDINATES  in the order in which they are absorbed, such as site,time,lane,unit. "key" is an index into KEYS (pairs of words) and must
//              come first; "layer" is the site of the dropout after that layer, a checksum of its name; any other is used as it is
// ORDER        the loops, innermost first, and their sizes, such as unit=650,lane=20,time=35,key=65536; coordinates not listed stay 0
// PART         SHIFT:WIDTH, the bits taken from each word, packed without gaps; "reversed" is the whole word in reverse bit order
// WORDS        how many 32-bit words to draw, before PART is taken; all of them if omitted
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 8
#define KEYS (1 << 16)
#define LAYERS (1 << 16)
typedef uint32_t u32;
typedef uint64_t u64;

static u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

static u32 keyed(const u32 *key, const u32 *w, int count) {
    u32 a = key[0], b = key[1];
    for (int n = 0; n < count - 1; n++) {
        a = mix((a ^ w[n]) * 0x9E3779B1u + b);
        b = mix(a ^ b ^ 0x7F4A7C15u);
    }
    u32 last = mix(w[count - 1] + 0x9E3779B9u);
    return mix(mix(a ^ last) * (last | 1) + b);
}

static u64 mix_64(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static u64 ordered(const u32 *w, int count) {
    const u64 golden = 0x9E3779B97F4A7C15u;
    u64 state = 0;
    for (int n = 0; n < count - 1; n++) state = mix_64((state ^ w[n]) + golden);
    return mix_64(state + (w[count - 1] + (u64)1) * golden);
}

static u32 checksum(u32 layer) {
    char name[40];
    u32 crc = ~0u;
    int length = snprintf(name, sizeof name, "lstm.l%u.dropout", layer);
    for (int n = 0; n < length; n++) {
        crc ^= (unsigned char)name[n];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static u32 buffer[1 << 14];
static size_t filled;

static void flush(void) {
    if (fwrite(buffer, 4, filled, stdout) != filled) exit(0);  // the battery has read enough
    filled = 0;
}

static void put(u32 word) {
    buffer[filled++] = word;
    if (filled == 1 << 14) flush();
}

static void put_part(u32 word, int shift, int width) {
    static u32 packed;
    static int held;
    if (width == 32) return put(word);
    packed |= (word >> shift & ((1u << width) - 1)) << held;
    held += width;
    if (held < 32) return;
    put(packed);
    packed = 0, held = 0;
}

static u32 reversed(u32 x) {
    x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
    x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
    x = (x & 0x0F0F0F0Fu) << 4 | (x >> 4 & 0x0F0F0F0Fu);
    return __builtin_bswap32(x);
}

static int fail(const char *what, const char *word) {
    fprintf(stderr, "random_stream: %s %s\n", what, word);
    return 2;
}

int main(int argc, char **argv) {
    char *names[MOST];
    int count = 0, loops = 0, place[MOST], shift = 0, width = 32;
    u32 limit[MOST], index[MOST] = {0}, word[MOST] = {0};
    static u32 keys[2 * KEYS], sites[LAYERS];
    if (argc < 5) return fail("see the first lines of", __FILE__);
    int wide = !strcmp(argv[1], "order"), turned = !strcmp(argv[4], "reversed");
    if (!turned && (sscanf(argv[4], "%d:%d", &shift, &width) != 2 || width < 1 || 32 % width || shift < 0 || shift + width > 32))
        return fail("part does not divide a 32-bit word evenly:", argv[4]);
    u64 left = argc > 5 ? strtoull(argv[5], NULL, 10) : ~(u64)0;
    for (char *name = strtok(argv[2], ","); name && count < MOST; name = strtok(NULL, ",")) names[count++] = name;
    for (char *loop = strtok(argv[3], ","); loop && loops < MOST; loop = strtok(NULL, ",")) {
        char *size = strchr(loop, '=');
        if (!size) return fail("no size given for", loop);
        *size = 0;
        for (place[loops] = 0; place[loops] < count && strcmp(names[place[loops]], loop); place[loops]++) continue;
        if (place[loops] == count) return fail("unknown coordinate", loop);
        limit[loops++] = strtoul(size + 1, NULL, 10);
    }
    int chosen = count > 0 && !strcmp(names[0], "key"), named[MOST];
    u64 held = wide ? 1 : fread(keys, 8, KEYS, stdin);
    for (u32 n = 0; n < LAYERS; n++) sites[n] = checksum(n);
    for (int n = 0; n < count; n++) {
        named[n] = !strcmp(names[n], "layer");
        word[n] = named[n] ? sites[0] : 0;
    }
    for (int n = 0; n < loops;) {
        if (chosen && word[0] >= held) return fail("too few keys on", "standard input");
        u64 drawn = wide ? ordered(word, count) : keyed(keys + 2 * (chosen ? word[0] : 0), word + chosen, count - chosen);
        for (int half = 0; half <= wide && left; half++, left--, drawn >>= 32)
            put_part(turned ? reversed((u32)drawn) : (u32)drawn, shift, width);
        if (!left) break;
        for (n = 0; n < loops && ++index[n] == limit[n]; n++) index[n] = 0;
        for (int each = 0; each < loops && each <= n; each++) {
            int at = place[each];
            word[at] = named[at] ? sites[index[each] % LAYERS] : index[each];
        }
    }
    flush();
    return fflush(stdout) != 0;
}
