/* SPDX-License-Identifier: Apache-2.0
 * This is catch (...) for C, and needs no C++ compiler. An exception looks for a frame whose personality routine says
 * that it handles it (Itanium C++ ABI, "Exception Handling", itanium-cxx-abi.github.io/cxx-abi/abi-eh.html). The one
 * frame of ca_guarded has ca_catch_all, which handles all that come by and goes on at ca_caught. Without such a frame
 * std::terminate would end the process. */
#include "guard.h"
#include <stdint.h>
#include <unwind.h>

#if defined(__x86_64__) && defined(__linux__)
#include "reserve.h"
#include <errno.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void ca_caught(void); /* a label in ca_guarded */

__attribute__((used, visibility("hidden"))) _Unwind_Reason_Code ca_catch_all(int version, _Unwind_Action actions,
                                                                             _Unwind_Exception_Class class,
                                                                             struct _Unwind_Exception *exception,
                                                                             struct _Unwind_Context *context) {
    (void)version;
    (void)class;
    if (actions & _UA_SEARCH_PHASE)
        return _URC_HANDLER_FOUND;
    if (!(actions & _UA_HANDLER_FRAME))
        return _URC_CONTINUE_UNWIND; /* a thread that is cancelled goes by */
    _Unwind_SetGR(context, __builtin_eh_return_data_regno(0), (uintptr_t)exception);
    _Unwind_SetIP(context, (uintptr_t)ca_caught);
    return _URC_INSTALL_CONTEXT;
}

/* __cxa_begin_catch and __cxa_end_catch are those of the C++ run time that libdnnl brings along. 0x1b says that the
 * routine is given by its distance, in 32 bits. */
__asm__(".text\n"
        ".globl ca_guarded\n"
        ".globl ca_caught\n"
        ".hidden ca_guarded\n"
        ".hidden ca_caught\n"
        ".type ca_guarded, @function\n"
        "ca_guarded:\n"
        "    .cfi_startproc\n"
        "    .cfi_personality 0x1b, ca_catch_all\n"
        "    sub $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    mov %rdi, %rax\n"
        "    mov %rsi, %rdi\n"
        "    call *%rax\n"
        "    xor %eax, %eax\n"
        "    jmp 1f\n"
        "ca_caught:\n"
        "    mov %rax, %rdi\n"
        "    call __cxa_begin_catch@PLT\n"
        "    call __cxa_end_catch@PLT\n"
        "    mov $1, %eax\n"
        "1:  add $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size ca_guarded, . - ca_guarded\n");

/* oneDNN's classes have an operator new of their own, which returns what posix_memalign has found. Where that is NULL
 * their constructors write to it, because the compiler may assume that what such an operator returns is not NULL
 * (src/common/c_types_map.hpp, c_compatible; v3.2). Descriptors are copied to what malloc returned, whatever that is.
 * So where the reserve ends, too, both functions throw for this library, as operator new does everywhere else. */
void _ZSt17__throw_bad_allocv(void); /* this is std::__throw_bad_alloc */

/* errno stays as it was where the reserve had the block, since `make` in primitive.c goes by it. */
static void *reserved(size_t alignment, size_t size, int before) {
    void *memory = alignment <= 64 ? ca_reserve_take(size) : NULL;
    if (memory)
        errno = before;
    return memory;
}

static int memalign_for_dnnl(void **memory, size_t alignment, size_t size) {
    const int before = errno;
    if (posix_memalign(memory, alignment, size) && !(*memory = reserved(alignment, size, before)))
        _ZSt17__throw_bad_allocv();
    return 0;
}

/* These are for operator new, which throws by itself, and for libgomp, which ends the process. */
static void *malloc_for_others(size_t size) {
    const int before = errno;
    void *memory = malloc(size);
    return memory ? memory : reserved(1, size, before);
}

static void *calloc_for_others(size_t n, size_t size) {
    const int before = errno;
    void *memory = calloc(n, size);
    if (!memory && n && size <= SIZE_MAX / n && (memory = reserved(1, n * size, before)))
        memset(memory, 0, n * size);
    return memory;
}

static void *malloc_for_dnnl(size_t size) {
    void *memory = malloc_for_others(size);
    if (!memory)
        _ZSt17__throw_bad_allocv();
    return memory;
}

/* Says what a library is to call instead of a function. */
typedef struct redirection {
    const char *name;
    uintptr_t to;
} redirection;
static const redirection dnnls[] = {
    {"posix_memalign", (uintptr_t)memalign_for_dnnl}, {"malloc", (uintptr_t)malloc_for_dnnl}, {NULL, 0}};
static const redirection others[] = {
    {"malloc", (uintptr_t)malloc_for_others}, {"calloc", (uintptr_t)calloc_for_others}, {NULL, 0}};

/* Describes a library, as the dynamic linker has it. */
typedef struct linked {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *names;
    const redirection *redirections;
} linked;

/* Names the library that has this address. */
typedef struct wanted {
    uintptr_t address;
    const redirection *redirections;
} wanted;

/* Redirects entries of the library's table of addresses. */
static void redirect(const linked *l, const ElfW(Rela) * at, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (const ElfW(Rela) *end = at + bytes / sizeof *at; at < end; at++) {
        const char *name = l->names + l->symbols[ELF64_R_SYM(at->r_info)].st_name;
        const int type = (int)ELF64_R_TYPE(at->r_info);
        uintptr_t *slot = (uintptr_t *)(l->base + at->r_offset);
        for (const redirection *r = l->redirections; r->name; r++)
            if ((type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT) && !strcmp(name, r->name) &&
                !mprotect((void *)((uintptr_t)slot / page * page), page, PROT_READ | PROT_WRITE))
                *slot = r->to;
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *which) {
    const wanted *w = which;
    const ElfW(Dyn) *dynamic = NULL;
    int here = 0;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + p->p_vaddr);
        here |= p->p_type == PT_LOAD && w->address - info->dlpi_addr - p->p_vaddr < p->p_memsz;
    }
    if (!here || !dynamic)
        return here;
    ElfW(Addr) found[DT_JMPREL + 1] = {0}; /* indexed by tag */
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag >= 0 && dynamic->d_tag <= DT_JMPREL)
            found[dynamic->d_tag] = dynamic->d_un.d_ptr;
    const linked l = {info->dlpi_addr, (const void *)found[DT_SYMTAB], (const void *)found[DT_STRTAB], w->redirections};
    if (found[DT_SYMTAB] < l.base) /* musl leaves these relative */
        return 1;
    redirect(&l, (const void *)found[DT_RELA], found[DT_RELASZ]);
    redirect(&l, (const void *)found[DT_JMPREL], found[DT_PLTRELSZ]);
    return 1;
}

/* This address is in the C++ run time, which libdnnl may have within itself. */
void *__cxa_begin_catch(void *);

void ca_guard_memory_of(uintptr_t dnnl, uintptr_t openmp) {
    wanted all[] = {{(uintptr_t)__cxa_begin_catch, others}, {openmp, others}, {dnnl, dnnls}};
    for (int i = 0; i < 3; i++)
        if (all[i].address)
            dl_iterate_phdr(visit, &all[i]);
}

#else

void ca_guard_memory_of(uintptr_t dnnl, uintptr_t openmp) {
    (void)dnnl;
    (void)openmp;
}

int ca_guarded(void (*run)(void *), void *with) {
    run(with);
    return 0;
}

#endif
