/* A stand-in for the CUDA driver's libcuda.so.1: starts, or answers with the error that CUDA_STUB names. */
#include <stdlib.h>
#include <unistd.h>

int cuInit(unsigned int flags);

int cuInit(unsigned int flags) {
    const char *told = getenv("CUDA_STUB");
    (void)flags;
    if (told == NULL) return 0;
    if (*told == 'x') abort();
    if (*told == 'h') pause();
    return atoi(told);
}
