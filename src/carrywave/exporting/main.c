
#ifdef MODEL_MAIN                  /* a program to try the file with: it reads steps and prints outputs */
#include <stdio.h>

int main(void)
{
    static model_state state;
    float out[MODEL_OUTPUTS];
    model_init(&state);
    for (;;) {
        int codes[MODEL_CODES + 1], token = 0, bad;
        float x[MODEL_NUMBERS + 1];
        for (int i = 0; i < MODEL_NUMBERS; i++)
            if (scanf("%f", &x[i]) != 1)
                return 0;
        for (int i = 0; i < MODEL_CODES; i++)
            if (scanf("%d", &codes[i]) != 1)
                return 0;
        if (MODEL_NUMBERS == 0 && scanf("%d", &token) != 1)
            return 0;
        bad = MODEL_STEP(&state, token, x, codes, out);
        if (bad) {
            fprintf(stderr, "an input is out of range\n");
            return 2;
        }
        (void)codes;
        (void)x;
        (void)token;
        for (int i = 0; i < MODEL_OUTPUTS; i++)
            printf("%.9g%c", out[i], i + 1 < MODEL_OUTPUTS ? ' ' : '\n');
    }
}
#endif
#endif
