/* Fuzzes the kernels that unpack, dequantize and convert: each input is one task, run on every
 * instruction set of the machine, which must agree bit for bit (NaN payloads aside).
 * `make fuzz-kernels` builds it with the sanitizers and runs it. */
#include "kernel_more_cases.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size)
        run_case(data[0] % READERS, data + 1, size - 1);
    return 0;
}
