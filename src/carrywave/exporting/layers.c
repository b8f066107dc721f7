
/* y = W x + b; without b, y = W x. */
static void linear(float *y, const float *weight, const float *bias, const float *x, int rows, int columns)
{
    for (int row = 0; row < rows; row++) {
        float sum = bias ? bias[row] : 0.0f;
        for (int column = 0; column < columns; column++)
            sum += weight[(long)row * columns + column] * x[column];
        y[row] = sum;
    }
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* One step of an LSTM: gates are those of the inputs, then of the outputs before, in the order input, forget, cell, output. */
static inline void lstm_step(float *h, float *c, float *gates, int hidden)
{
    float *own = gates + 4 * hidden;
    for (int i = 0; i < 4 * hidden; i++)
        gates[i] += own[i];
    for (int i = 0; i < hidden; i++) {
        c[i] = sigmoid(gates[hidden + i]) * c[i] + sigmoid(gates[i]) * tanhf(gates[2 * hidden + i]);
        h[i] = sigmoid(gates[3 * hidden + i]) * tanhf(c[i]);
    }
}

/* One step of a GRU: gates as above, in the order reset, update, new. */
static inline void gru_step(float *h, const float *gates, int hidden)
{
    const float *own = gates + 3 * hidden;
    for (int i = 0; i < hidden; i++) {
        float update = sigmoid(gates[hidden + i] + own[hidden + i]);
        float fresh = tanhf(gates[2 * hidden + i] + sigmoid(gates[i] + own[i]) * own[2 * hidden + i]);
        h[i] = (1.0f - update) * fresh + update * h[i];
    }
}

/* Layer norm. */
static inline void normed(float *y, const float *x, const float *gain, const float *bias, int width, float epsilon)
{
    float mean = 0.0f, square = 0.0f;
    for (int i = 0; i < width; i++)
        mean += x[i] / width;
    for (int i = 0; i < width; i++)
        square += (x[i] - mean) * (x[i] - mean) / width;
    for (int i = 0; i < width; i++)
        y[i] = (x[i] - mean) / sqrtf(square + epsilon) * gain[i] + bias[i];
}

static inline void softmax(float *y, int width)
{
    float most = y[0], sum = 0.0f;
    for (int i = 1; i < width; i++)
        most = fmaxf(most, y[i]);
    for (int i = 0; i < width; i++)
        sum += y[i] = expf(y[i] - most);
    for (int i = 0; i < width; i++)
        y[i] /= sum;
}

/* Attention over the steps so far: rows is the weighted sum, then the sum of weights and the highest score. */
static inline void attended(float *mean, float *rows, const float *y, const float *query, int width, float steps)
{
    float score = 0.0f, *weight = rows + width, *highest = rows + width + 1;
    for (int i = 0; i < width; i++)
        score += query[i] * y[i];
    float top = steps > 1.0f ? fmaxf(*highest, score) : score;
    float before = steps > 1.0f ? expf(*highest - top) : 0.0f, now = expf(score - top);
    *weight = *weight * before + now;
    *highest = top;
    for (int i = 0; i < width; i++) {
        rows[i] = rows[i] * before + y[i] * now;
        mean[i] = rows[i] / *weight;
    }
}
