/* SPDX-License-Identifier: Apache-2.0
 * NumPy arrays are read where they lie: this takes 10 ns each, where ndarray.__array_interface__ takes 970. Of torch's
 * tensors a function of torch's tells the address, the shape, the strides and the dtype: three take 1 us with the call
 * from Python, where tensor.numpy() and what it needs take 6, and 11 where 49 behind a model's weights. */
#include "check.h"

#define OWNDATA 0x4
#define WRITEABLE 0x400

/* These fields follow the object's head in a PyArrayObject. NumPy cannot change them without a new ABI, since
 * PyArray_DATA and its kin are compiled into everybody's extension modules. _arrays.py tries them out on import. */
typedef struct numpy_array {
    char *data;
    int ndim;
    const intptr_t *shape, *strides; /* strides in bytes */
    const void *base, *dtype;
    int flags;
} numpy_array;

static struct {
    uintptr_t ndarray, none;
    int64_t head;
    int num_dtypes;
    struct {
        uintptr_t object;
        int32_t dtype, itemsize; /* a power of two */
    } dtypes[16];
} numpy;

void ca_know_numpy(uintptr_t ndarray, uintptr_t none, int64_t head) {
    numpy.ndarray = ndarray;
    numpy.none = none;
    numpy.head = head;
    numpy.num_dtypes = 0;
}

void ca_know_dtype(uintptr_t object, int32_t dtype, int32_t itemsize) {
    int i = numpy.num_dtypes++;
    numpy.dtypes[i].object = object;
    numpy.dtypes[i].dtype = dtype;
    numpy.dtypes[i].itemsize = itemsize;
}

static int read_dtype(const void *object, ca_array *out) {
    for (int i = 0; i < numpy.num_dtypes; i++)
        if (numpy.dtypes[i].object == (uintptr_t)object) {
            out->dtype = numpy.dtypes[i].dtype;
            out->itemsize = numpy.dtypes[i].itemsize;
            return 1;
        }
    return 0;
}

/* An object's head ends in its type. */
static uintptr_t type_of(uintptr_t object) { return ((const uintptr_t *)(object + (uintptr_t)numpy.head))[-1]; }

static const numpy_array *as_numpy(uintptr_t object) {
    return type_of(object) == numpy.ndarray ? (const numpy_array *)(object + (uintptr_t)numpy.head) : NULL;
}

/* Returns whether an array stands for a tensor whose memory is gone. torch's bridge gives such an array memory of its
 * own, so that it owns its memory and yet has a base, which no other array does. */
static int is_torn(const numpy_array *x) {
    for (; x && x->base; x = as_numpy((uintptr_t)x->base))
        if (x->flags & OWNDATA)
            return 1;
    return 0;
}

int ca_read_array(uintptr_t object, ca_array *out) {
    memset(out, 0, sizeof *out);
    if (!numpy.ndarray)
        return 0;
    if (object == numpy.none)
        return 1;
    const numpy_array *x = as_numpy(object);
    if (!x || x->ndim > 4 || is_torn(x) || !read_dtype(x->dtype, out))
        return 0;
    out->address = (uintptr_t)x->data;
    out->ndim = x->ndim;
    out->writable = (x->flags & WRITEABLE) != 0;
    const int shift = __builtin_ctz((unsigned)out->itemsize);
    for (int i = 0; i < x->ndim; i++) {
        if (x->strides[i] & (out->itemsize - 1))
            return 0;
        out->shape[i] = x->shape[i];
        out->strides[i] = x->strides[i] >> shift;
    }
    return 1;
}

/* The next two are structs of dlpack.h 1.3: DLTensor, and DLPackExchangeAPI with the header that it begins with. */
typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides; /* strides in elements */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_exchange {
    uint32_t major, minor;
    const void *before, *allocate, *take, *give;
    int (*borrow)(void *object, dl_tensor *out); /* not 0: it has set Python's exception */
} dl_exchange;

#define DL_MAJOR 1
#define DL_CPU 1

static struct {
    uintptr_t type;
    const dl_exchange *exchange;
    int num_dtypes;
    struct {
        int code, bits;
        int32_t dtype, itemsize;
    } dtypes[16];
} tensors;

int ca_know_tensors(uintptr_t type, uintptr_t exchange) {
    const dl_exchange *x = (const void *)exchange;
    if (x->major != DL_MAJOR || !x->borrow)
        return 0;
    tensors.type = type;
    tensors.exchange = x;
    return 1;
}

void ca_know_dlpack_dtype(int code, int bits, int32_t dtype, int32_t itemsize) {
    int i = tensors.num_dtypes++;
    tensors.dtypes[i].code = code;
    tensors.dtypes[i].bits = bits;
    tensors.dtypes[i].dtype = dtype;
    tensors.dtypes[i].itemsize = itemsize;
}

static int read_tensor(const dl_tensor *t, ca_array *out) {
    memset(out, 0, sizeof *out);
    if (t->device_type != DL_CPU || t->lanes != 1 || t->ndim > 4)
        return 0;
    for (int i = 0; i < tensors.num_dtypes; i++)
        if (tensors.dtypes[i].code == t->code && tensors.dtypes[i].bits == t->bits) {
            out->dtype = tensors.dtypes[i].dtype;
            out->itemsize = tensors.dtypes[i].itemsize;
        }
    out->address = (uintptr_t)t->data + t->byte_offset;
    out->ndim = t->ndim;
    out->writable = 1;
    for (int i = 0; i < t->ndim; i++) {
        out->shape[i] = t->shape[i];
        out->strides[i] = t->strides[i];
    }
    return out->itemsize != 0;
}

int ca_borrow_tensors(const uintptr_t *objects, int count, uintptr_t *to, ca_array *given) {
    for (int i = 0; i < count; i++) {
        dl_tensor t;
        to[i] = objects[i];
        if (type_of(objects[i]) != tensors.type)
            continue;
        if (tensors.exchange->borrow((void *)objects[i], &t))
            return -1;
        if (read_tensor(&t, &given[i]))
            to[i] = 0;
    }
    return 0;
}
