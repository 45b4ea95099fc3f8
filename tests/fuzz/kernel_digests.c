/* A digest of what each kernel makes of the same pseudo-random tasks. On one machine the instruction
 * sets must agree, or it aborts; between machines and compilers the lines it prints are compared.
 *
 *     kernel_digests [TASKS]     of each kernel, 64 unless told; for kernels of block types, of each
 */
#include "kernel_more_cases.h"

int main(int count, char **arguments)
{
    int tasks = count > 1 ? atoi(arguments[1]) : 64;
    for (int which = 0; which < CASES; which++) {
        int types = strncmp(cases[which].name, "gguf", 4) ? 1 : BLOCK_TYPES;
        for (int type = 0; type < types; type++) {
            uint64_t digest = 0;
            for (int task = 0; task < tasks; task++) {
                /* The first two bytes choose the type, where there is one. */
                uint8_t data[] = {(uint8_t)type, 0, (uint8_t)task, (uint8_t)(task >> 8)};
                size_t skip = types == 1 ? 1 : 0;
                digest = digest * UINT64_C(0x100000001b3) + run_case(which, data + skip, 4 - skip);
            }
            printf("%s %s %016llx\n", cases[which].name, types == 1 ? "-" : block_types[type].name,
                   (unsigned long long)digest);
        }
    }
    for (int isa = 0; qt_available(isa); isa++)
        fprintf(stderr, "%s%s", isa ? " = " : "", qt_available(isa));
    fprintf(stderr, " on %d tasks of each kernel and type\n", tasks);
    return 0;
}
