#include "runtime.h"

#include <stdlib.h>

static int num_threads = 1;

int inferd_threads(void) { return num_threads; }
void inferd_set_threads(int threads) { num_threads = threads < 1 ? 1 : threads; }

static _Thread_local void *scratch;
static _Thread_local size_t scratch_bytes;

void *inferd_scratch(size_t bytes) {
    if (bytes <= scratch_bytes) return scratch;
    free(scratch);
    bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    scratch = aligned_alloc(64, bytes);
    scratch_bytes = scratch ? bytes : 0;
    return scratch;
}
