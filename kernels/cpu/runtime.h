/* What the kernels share: the number of threads and scratch memory. */
#ifndef INFERD_RUNTIME_H
#define INFERD_RUNTIME_H

#include <stddef.h>

/* Results of a kernel, checked by its caller. */
#define INFERD_OK 0
#define INFERD_BAD_INDEX 1 /* a position, slot, block id or length points outside of its table */
#define INFERD_NO_MEMORY 2

int inferd_threads(void);
void inferd_set_threads(int threads);

/* At least `bytes` of 64-byte aligned memory, owned by the calling thread and valid until its next call; NULL without. */
void *inferd_scratch(size_t bytes);

#endif
