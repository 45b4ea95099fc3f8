/* Arrays of numbers as kernels see them. Included by base.h inside its namespace. */

/* Sixteen bytes, and eight. */
struct Four {
    uint32_t word[4];
};
struct Two {
    uint32_t word[2];
};

#if defined(QT_CHECKED)

/* What the first access that is not allowed was; the test prints it. */
struct Fault {
    const char *what;
    int64_t at, count;
};
extern Fault fault;
QT_HD void refuse(const char *what, int64_t at, int64_t count)
{
    if (!fault.what)
        fault = Fault{what, at, count};
}

/* Whether this thread has waited (wait_for_kernels_before), and where the arrays are that were read
 * before that. */
extern bool waited;
struct Early {
    enum { MOST = 8 };
    const void *at[MOST];
    int count;
    void note(const void *array)
    {
        for (int i = 0; i < count; i++)
            if (at[i] == array)
                return;
        if (count < MOST)
            at[count++] = array;
    }
};
extern Early early;
QT_HD void refuse_early(int64_t at, int64_t count)
{
    if (!waited)
        refuse("used without having waited for the kernels before, element", at, count);
}

template <class T> struct In {
    const T *at = nullptr;
    int64_t count = 0, begin = 0;
    In() {}
    In(int64_t address, int64_t bytes)
        : at((const T *)address), count(bytes / (int64_t)sizeof(T)), begin(0)
    {
    }
    T operator[](int64_t i) const { return wide<T>(i); }
    /* The same array, counted from element i on. */
    In from(int64_t i) const
    {
        In found = *this;
        found.begin += i;
        return found;
    }
    In from(uint32_t i, uint32_t size) const { return from((int64_t)i * size); }
    In next(uint32_t size) const { return from((int64_t)size); }
    /* A wider number that begins with element i. */
    template <class W> W wide(int64_t i) const
    {
        W found;
        i += begin;
        memset(&found, 0, sizeof found);
        if (i < 0 || (i + 0) * (int64_t)sizeof(T) + (int64_t)sizeof(W) > count * (int64_t)sizeof(T))
            refuse("read outside of the array, element", i, count);
        else if (i * (int64_t)sizeof(T) % (int64_t)sizeof(W))
            refuse("read at an address that is no multiple of its size, element", i, count);
        else
            memcpy(&found, at + i, sizeof found);
        if (!waited)
            early.note(at);
        return found;
    }
    /* The same where it is written: not behind a wait that comes after it. */
    template <class W> W here(int64_t i) const { return wide<W>(i); }
    /* `n` elements from i on, all of which may be read. */
    const T *run(int64_t i, int64_t n) const
    {
        i += begin;
        if (i >= 0 && i + n <= count)
            return at + i;
        refuse("read outside of the array, element", i, count);
        return nullptr;
    }
};

/* One byte for each element, that says it was written. */
extern uint8_t *written;

template <class T> struct Out {
    T *at;
    int64_t count;
    Out(int64_t address, int64_t bytes) : at((T *)address), count(bytes / (int64_t)sizeof(T)) {}
    void put(int64_t i, T value) const { put_wide<T>(i, value); }
    template <class W> void put_wide(int64_t i, W value) const
    {
        const int64_t n = (int64_t)(sizeof(W) / sizeof(T));
        refuse_early(i, count);
        if (i < 0 || i + n > count)
            return refuse("write outside of the array, element", i, count);
        if (i % n)
            return refuse("write at an address that is no multiple of its size, element", i, count);
        for (int64_t k = i; k < i + n; k++) {
            if (written[k])
                return refuse("written twice, element", k, count);
            written[k] = 1;
        }
        memcpy(at + i, &value, sizeof value);
    }
};

/* Memory that blocks leave each other something in. */
template <class T> struct Scratch {
    T *at;
    int64_t count;
    Scratch(int64_t address, int64_t bytes) : at((T *)address), count(bytes / (int64_t)sizeof(T)) {}
    T *place(int64_t i) const
    {
        static T nowhere;
        refuse_early(i, count);
        if (i >= 0 && i < count)
            return at + i;
        refuse("outside of the array, element", i, count);
        return &nowhere;
    }
    T get(int64_t i) const { return *place(i); }
    void put(int64_t i, T value) const { *place(i) = value; }
    T count_up(int64_t i) const { return (*place(i))++; }
};

/* Memory that the threads of a block share. */
template <class T, int COUNT> struct Shared {
    T at[COUNT];
    uint8_t filled[COUNT];
    void clear() { memset(filled, 0, sizeof filled); }
    T get(int64_t i) const { return wide<T>(i); }
    template <class W> W wide(int64_t i) const
    {
        const int64_t n = (int64_t)(sizeof(W) / sizeof(T));
        W found;
        memset(&found, 0, sizeof found);
        if (i < 0 || i + n > COUNT || i % n) {
            refuse("read outside of shared memory, or between its places, element", i, COUNT);
            return found;
        }
        for (int64_t k = i; k < i + n; k++)
            if (!filled[k])
                refuse("read of shared memory that no thread wrote, element", k, COUNT);
        memcpy(&found, at + i, sizeof found);
        return found;
    }
    void put(int64_t i, T value) { put_wide<T>(i, value); }
    template <class W> void put_wide(int64_t i, W value)
    {
        const int64_t n = (int64_t)(sizeof(W) / sizeof(T));
        if (i < 0 || i + n > COUNT || i % n)
            return refuse("write outside of shared memory, or between its places, element", i, COUNT);
        for (int64_t k = i; k < i + n; k++) {
            if (filled[k])
                return refuse("shared memory written twice, element", k, COUNT);
            filled[k] = 1;
        }
        memcpy(at + i, &value, sizeof value);
    }
};

#else

/* Through the read-only cache. */
#if defined(QT_ON_DEVICE)
template <class W> QT_HD W read_only(const W *at) { return __ldg(at); }
QT_HD Four read_only(const Four *at)
{
    uint4 found = __ldg((const uint4 *)at);
    return Four{{found.x, found.y, found.z, found.w}};
}
QT_HD Two read_only(const Two *at)
{
    uint2 found = __ldg((const uint2 *)at);
    return Two{{found.x, found.y}};
}
/* Not through it, and where it is written, before or after a wait: the compiler puts loads of that
 * cache behind waits that they stood before. */
QT_HD Four read_here(const Four *at)
{
    Four found;
    uint32_t *word = found.word;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(at));
    return found;
}
QT_HD Two read_here(const Two *at)
{
    Two found;
    uint32_t *word = found.word;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(at));
    return found;
}
QT_HD uint32_t read_here(const uint32_t *at)
{
    uint32_t found;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(found) : "l"(at));
    return found;
}
QT_HD float read_here(const float *at) { return float_of_bits(read_here((const uint32_t *)at)); }
/* One store, which the compiler would make four of where addresses are steps apart. */
QT_HD void write_global(Four *at, const Four &value)
{
    const uint32_t *word = value.word;
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}
QT_HD void write(Four *at, const Four &value)
{
    *(uint4 *)at = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}
QT_HD Four read_shared(const Four *at)
{
    uint4 found = *(const uint4 *)at;
    return Four{{found.x, found.y, found.z, found.w}};
}
QT_HD Two read_shared(const Two *at)
{
    uint2 found = *(const uint2 *)at;
    return Two{{found.x, found.y}};
}
#else
template <class W> QT_HD W read_only(const W *at) { return *at; }
template <class W> QT_HD W read_here(const W *at) { return *at; }
QT_HD void write(Four *at, const Four &value) { *at = value; }
QT_HD Four read_shared(const Four *at) { return *at; }
#endif
template <class W> QT_HD void write_global(W *at, const W &value) { *at = value; }
template <class W> QT_HD void write(W *at, const W &value) { *at = value; }
template <class W> QT_HD W read_shared(const W *at) { return *at; }

template <class T> struct In {
    const T *at;
    QT_MEMBER In() {}
    QT_MEMBER In(int64_t address, int64_t) : at((const T *)address) {}
    QT_MEMBER T operator[](int64_t i) const { return read_only(at + i); }
    QT_MEMBER In from(int64_t i) const { return In((int64_t)(at + i), 0); }
    /* From element i * size on, or `size`: written so that the compiler adds to the address at hand, where
     * it would take three instructions for each of several. */
    QT_MEMBER In from(uint32_t i, uint32_t size) const
    {
        int64_t found = (int64_t)at, step = (int64_t)((uint64_t)size * sizeof(T));
#if defined(QT_ON_DEVICE)
        asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(found) : "r"(i), "r"((uint32_t)step), "l"((int64_t)at));
#else
        found += i * step;
#endif
        return In(found, 0);
    }
    QT_MEMBER In next(uint32_t size) const
    {
        int64_t found = (int64_t)at, step = (int64_t)((uint64_t)size * sizeof(T));
#if defined(QT_ON_DEVICE)
        asm("add.s64 %0, %1, %2;" : "=l"(found) : "l"((int64_t)at), "l"(step));
#else
        found += step;
#endif
        return In(found, 0);
    }
    template <class W> QT_MEMBER W wide(int64_t i) const { return read_only((const W *)(at + i)); }
    template <class W> QT_MEMBER W here(int64_t i) const { return read_here((const W *)(at + i)); }
    QT_MEMBER const T *run(int64_t i, int64_t) const { return at + i; }
};

template <class T> struct Out {
    T *at;
    QT_MEMBER Out(int64_t address, int64_t) : at((T *)address) {}
    QT_MEMBER void put(int64_t i, T value) const { at[i] = value; }
    template <class W> QT_MEMBER void put_wide(int64_t i, const W &value) const
    {
        write_global((W *)(at + i), value);
    }
};

/* Not through the read-only cache, nor that of an SM. */
template <class T> struct Scratch {
    T *at;
    QT_MEMBER Scratch(int64_t address, int64_t) : at((T *)address) {}
#if defined(QT_ON_DEVICE)
    QT_MEMBER T get(int64_t i) const { return __ldcg(at + i); }
    QT_MEMBER void put(int64_t i, T value) const { __stcg(at + i, value); }
    /* Before it counts, all is there for others that this thread wrote, and those that it met at a
     * barrier; after, what others wrote before they counted is there for it, and those that it meets. */
    QT_MEMBER T count_up(int64_t i) const
    {
        T found;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(found)
                     : "l"(at + i)
                     : "memory");
        return found;
    }
#else
    QT_MEMBER T get(int64_t i) const { return at[i]; }
    QT_MEMBER void put(int64_t i, T value) const { at[i] = value; }
    QT_MEMBER T count_up(int64_t i) const { return at[i]++; }
#endif
};

template <class T, int COUNT> struct alignas(16) Shared {
    T at[COUNT];
    QT_MEMBER T get(int64_t i) const { return at[i]; }
    template <class W> QT_MEMBER W wide(int64_t i) const { return read_shared((const W *)(at + i)); }
    QT_MEMBER void put(int64_t i, T value) { at[i] = value; }
    template <class W> QT_MEMBER void put_wide(int64_t i, const W &value)
    {
        write((W *)(at + i), value);
    }
};

#endif

/* Numbers that kernels launched before may still write: read after wait_for_kernels_before, by loads
 * that stay there. */
template <class T> struct Late {
    In<T> all;
    QT_MEMBER Late from(uint32_t i, uint32_t size) const { return Late{all.from(i, size)}; }
    template <class W> QT_MEMBER W wide(int64_t i) const
    {
#if defined(QT_CHECKED)
        refuse_early(all.begin + i, all.count);
#endif
        return all.template here<W>(i);
    }
    QT_MEMBER T operator[](int64_t i) const { return wide<T>(i); }
};
