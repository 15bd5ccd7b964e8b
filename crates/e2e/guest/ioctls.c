/*
 * Asks the kernel module for what makes no sense, by every ioctl of /dev/rackbus and by some that it has not, with
 * arguments that are noise, at addresses where nothing is, at the end of a page, or that cannot be written. It refuses
 * all of it; what is borrowed stays.
 *
 * usage: ioctls NTB       0000:05:00.0, which the module owns
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/rackbus.h>

enum { ROUNDS = 20000, PAGE = 4096, KINDS = 6, PLACES = 6 };

/* Handles below are of functions that are borrowed. */
static const uint32_t OTHERS = 1 << 16;

static uint64_t state = 1;

static uint64_t noise(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static uint32_t word(void)
{
    switch (noise() % 4) {
    case 0:
        return 0;
    case 1:
        return noise() % 64;
    case 2:
        return UINT32_MAX - noise() % 4;
    }
    return noise();
}

static char *page(int protection)
{
    char *at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (at == MAP_FAILED || munmap(at + PAGE, PAGE)) {
        perror("mmap");
        exit(1);
    }
    for (unsigned n = 0; n < PAGE; n += 4)
        memcpy(at + n, &(uint32_t){word()}, 4);
    if (mprotect(at, PAGE, protection)) {
        perror("mprotect");
        exit(1);
    }
    return at;
}

/* What a call may be given: memory that is there, and others. */
static void *places[PLACES];

static void *place(void)
{
    return places[noise() % PLACES];
}

/* Whether it is one that asks for a change, which noise must not be granted. */
static int fill(unsigned kind, char *at, size_t size, const struct rackbus_address *ntb)
{
    struct rackbus_borrow *borrow = (void *)at;
    struct rackbus_return *give = (void *)at;
    struct rackbus_list *list = (void *)at;

    for (size_t n = 0; n < size / 4; n++)
        memcpy(at + 4 * n, &(uint32_t){word()}, 4);
    switch (kind) {
    case 1:
        if (noise() % 16)
            return 1;
        borrow->ntb = *ntb;
        borrow->offset = noise() % 3 ? noise() % (64 << 20) & ~(uint64_t)(PAGE - 1) : noise();
        borrow->epoch = noise() | 1ull << 63;
        borrow->vectors = noise() % 40;
        borrow->flags = borrow->handle = borrow->domain = 0;
        borrow->name[noise() % sizeof(borrow->name)] = 0;
        return 1;
    case 2:
    case 3:
        give->handle |= OTHERS;
        return 1;
    case 4:
        list->handles = (uintptr_t)place();
        return 0;
    }
    return 0;
}

int main(int arguments, char **argument)
{
    static const unsigned long commands[KINDS] = {
        RACKBUS_VERSION_GET, RACKBUS_BORROW, RACKBUS_RETURN, RACKBUS_LOST, RACKBUS_LIST, RACKBUS_STATUS,
    };
    static const size_t sizes[KINDS] = {
        4, sizeof(struct rackbus_borrow), sizeof(struct rackbus_return), sizeof(struct rackbus_lost),
        sizeof(struct rackbus_list), sizeof(struct rackbus_status),
    };
    unsigned domain, bus, slot, function, refused = 0;
    struct rackbus_address ntb = {0};
    int device = open("/dev/rackbus", O_RDWR | O_NONBLOCK);

    if (device < 0 || arguments != 2 ||
        sscanf(argument[1], "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
        fprintf(stderr, "usage: ioctls NTB, with the module: %s\n", strerror(errno));
        return 2;
    }
    ntb.domain = domain, ntb.bus = bus, ntb.devfn = slot << 3 | function;
    places[0] = places[1] = page(PROT_READ | PROT_WRITE);
    places[2] = page(PROT_READ);
    places[3] = (char *)places[0] + PAGE;           /* nothing is there */
    places[4] = (void *)0xffff888000000000;         /* the kernel's */
    places[5] = NULL;
    for (unsigned n = 0; n < ROUNDS; n++) {
        unsigned kind = noise() % KINDS;
        char *at = places[0];
        void *given;
        int changes;

        /* The last bytes of a page, of which some may be missing. */
        if (noise() % 2)
            at += PAGE - sizes[kind] / 4 * 4;
        changes = fill(kind, at, sizes[kind], &ntb);
        given = noise() % 4 ? at : noise() % 2 ? place() : at + noise() % PAGE;
        /* Elsewhere is noise as well, of which a handle may be one that is borrowed. */
        if (given != at && (kind == 2 || kind == 3))
            given = places[3];
        if (noise() % 8 == 0) {
            if (ioctl(device, noise() % 2 ? commands[kind] ^ 1ul << noise() % 32 : (unsigned long)noise(), places[3]) == 0) {
                fprintf(stderr, "round %u: it takes a call that it has not\n", n);
                return 1;
            }
            refused++;
        }
        if (ioctl(device, commands[kind], given) < 0) {
            refused++;
        } else if (changes) {
            fprintf(stderr, "round %u: call %u was carried out\n", n, kind);
            return 1;
        }
        /* Whatever this says. */
        if (read(device, place(), noise() % 16) < 0)
            refused++;
    }
    printf("%u calls were refused\n", refused);
    return 0;
}
