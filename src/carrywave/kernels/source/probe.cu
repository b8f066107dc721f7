// A kernel that does nothing. The driver is asked how many clusters of such blocks run at once.
extern "C" __global__ void probe() {}
