// Runs TestU01's batteries on 32-bit words from standard input. cc -O2 testu01_stdin.c -ltestu01 -lprobdist -lmylib -lm -o testu01_stdin
//     testu01_stdin small|crush|big [TEST …]      given test numbers, runs only those
#include <bbattery.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <swrite.h>
#include <unif01.h>

static unsigned int next(void) {
    static unsigned int words[1 << 14];
    static size_t held, used;
    if (used == held) {
        held = fread(words, 4, 1 << 14, stdin), used = 0;
        if (!held) fprintf(stderr, "the stream has ended\n"), exit(3);
    }
    return words[used++];
}

int main(int argc, char **argv) {
    const char *battery = argc > 1 ? argv[1] : "small";
    static int repeated[256];  // by test number: 1 to run it, 0 to skip it
    for (int n = 2; n < argc; n++) repeated[atoi(argv[n])] = 1;
    swrite_Basic = FALSE;
    unif01_Gen *generator = unif01_CreateExternGenBits("standard input", next);
    if (!strcmp(battery, "big")) argc > 2 ? bbattery_RepeatBigCrush(generator, repeated) : bbattery_BigCrush(generator);
    else if (!strcmp(battery, "crush")) argc > 2 ? bbattery_RepeatCrush(generator, repeated) : bbattery_Crush(generator);
    else argc > 2 ? bbattery_RepeatSmallCrush(generator, repeated) : bbattery_SmallCrush(generator);
    unif01_DeleteExternGenBits(generator);
    return 0;
}
