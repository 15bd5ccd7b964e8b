/* See common.h. */
#define _POSIX_C_SOURCE 200809L

#include "common.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Set once, for messages. */
static const struct program *the_program;

/* What every tool understands. */
static struct {
    int client, server, json;
    const char *remote;
    unsigned int adapter, id, patience;
} given = {.patience = 60};

static struct option shared[] = {
    {"-rn", OPTION_TEXT, &given.remote, "NODE", "the other host: its node id or its name"},
    {"-client", OPTION_FLAG, &given.client, NULL, "be the side that measures"},
    {"-server", OPTION_FLAG, &given.server, NULL, "be the side that answers"},
    {"-a", OPTION_NUMBER, &given.adapter, "NUMBER", "adapter (0)"},
    {"-id", OPTION_NUMBER, &given.id, "NUMBER",
     "first id of segments and interrupts (made of both node ids)"},
    {"-wait", OPTION_NUMBER, &given.patience, "SECONDS",
     "how long to wait for the other side (60; 0: for ever)"},
    {"-json", OPTION_FLAG, &given.json, NULL, "print each row as a JSON object as well"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static int is_shared(const struct option *option)
{
    return option->value != &given.remote || the_program->one_peer;
}

static void print_options(const struct option *options)
{
    for (; options->name != NULL; options++) {
        char left[40];
        if (!is_shared(options))
            continue;
        snprintf(left, sizeof left, "%s %s", options->name,
                 options->argument == NULL ? "" : options->argument);
        printf("  %-18s %s\n", left, options->help);
    }
}

static void print_help(void)
{
    printf("%s: %s\n\nusage: %s%s (-client | -server) [options]\n", the_program->name,
           the_program->about, the_program->name, the_program->one_peer ? " -rn NODE" : "");
    print_options(shared);
    print_options(the_program->options);
    printf("  %-18s %s\n\nexamples:\n%s\nexit codes: 0 done, 1 failed, 2 called wrongly\n", "-help",
           "print this", the_program->examples);
}

void usage_error(const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "%s: ", the_program->name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "; see %s -help\n", the_program->name);
    exit(EXIT_USAGE);
}

static void print_failure(sci_error_t error, const char *format, va_list arguments)
{
    fflush(stdout);
    fprintf(stderr, "%s: ", the_program->name);
    vfprintf(stderr, format, arguments);
    if (error != SCI_ERR_OK)
        fprintf(stderr, ": %s (0x%x)", SCIGetErrorString(error), (unsigned int)error);
    fputc('\n', stderr);
}

void fail(sci_error_t error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print_failure(error, format, arguments);
    va_end(arguments);
    SCITerminate();
    exit(EXIT_FAILED);
}

void check(sci_error_t error, const char *format, ...)
{
    va_list arguments;
    if (error == SCI_ERR_OK)
        return;
    va_start(arguments, format);
    print_failure(error, format, arguments);
    va_end(arguments);
    SCITerminate();
    exit(EXIT_FAILED);
}

/* A number, decimal or 0x..., of at most limit; a size may end with K, M or G. */
static unsigned long long read_number(const char *option, const char *text, int is_size,
                                      unsigned long long limit)
{
    char *end;
    unsigned long long value;
    unsigned int shift = 0;
    errno = 0;
    value = strtoull(text, &end, 0);
    if (is_size && *end != '\0' && strchr("KkMmGg", *end) != NULL) {
        shift = *end == 'K' || *end == 'k' ? 10 : *end == 'M' || *end == 'm' ? 20 : 30;
        end++;
    }
    if (errno != 0 || end == text || *end != '\0' || strchr(text, '-') != NULL)
        usage_error("%s takes a number, not '%s'", option, text);
    if (value > limit >> shift)
        usage_error("%s is at most %llu, not '%s'", option, limit, text);
    return value << shift;
}

static const struct option *find_option(const struct option *options, const char *name)
{
    for (; options->name != NULL; options++)
        if (strcmp(options->name, name) == 0 && is_shared(options))
            return options;
    return NULL;
}

void read_options(const struct program *program, int argc, char **argv)
{
    int i;
    the_program = program;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i];
        const struct option *option = find_option(shared, name);
        if (option == NULL)
            option = find_option(the_program->options, name);
        if (strcmp(name, "-help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            print_help();
            exit(EXIT_DONE);
        }
        if (option == NULL)
            usage_error("there is no option '%s'", name);
        if (option->kind == OPTION_FLAG) {
            *(int *)option->value = 1;
            continue;
        }
        if (++i == argc)
            usage_error("%s takes a %s", name, option->argument);
        if (option->kind == OPTION_NUMBER)
            *(uint32_t *)option->value = (uint32_t)read_number(name, argv[i], 0, UINT32_MAX);
        else if (option->kind == OPTION_SIZE)
            *(size_t *)option->value = (size_t)read_number(name, argv[i], 1, SIZE_MAX);
        else
            *(const char **)option->value = argv[i];
    }
    if (given.client == given.server)
        usage_error("say one of -client and -server");
    if (the_program->one_peer && given.remote == NULL)
        usage_error("say with -rn which host the other side is on");
}

/* The node id that a number or a host's name means. */
static unsigned int find_node(const char *name)
{
    dis_nodeId_list_t nodes = {0};
    dis_virt_adapter_t type;
    sci_error_t error;
    if (strspn(name, "0123456789abcdefABCDEFx") == strlen(name) && name[0] <= '9')
        return (unsigned int)read_number("-rn", name, 0, UINT32_MAX);
    SCIGetNodeIdByAdapterName(name, &nodes, &type, 0, &error);
    if (error != SCI_ERR_OK || nodes[0] == 0)
        fail(error, "no host is called '%s'", name);
    return nodes[0];
}

void session_open(struct session *session)
{
    const struct program *program = the_program;
    sci_error_t error;
    setvbuf(stdout, NULL, _IOLBF, 0);
    SCIInitialize(0, &error);
    check(error, "cannot use the rack; is this host's node up?");
    session->client = given.client;
    session->json = given.json;
    session->adapter = given.adapter;
    session->patience = given.patience;
    SCIGetLocalNodeId(given.adapter, &session->local, 0, &error);
    check(error, "cannot tell the node id of adapter %u", given.adapter);
    session->remote = program->one_peer ? find_node(given.remote) : session->local;
    session->id = given.id;
    if (given.id == 0) {
        unsigned int server = given.client ? session->remote : session->local;
        unsigned int client = given.client ? session->local : session->remote;
        session->id = server << 24 | client << 16 | (unsigned int)program->number << 8;
    }
    SCIOpen(&session->sd, 0, &error);
    check(error, "cannot open a descriptor");
}

void session_close(struct session *session)
{
    sci_error_t error;
    SCIClose(session->sd, 0, &error);
    check(error, "cannot close the descriptor");
    SCITerminate();
}

void own_create(struct own_segment *own, const struct session *session, unsigned int id,
                size_t size)
{
    sci_error_t error;
    own->size = size;
    SCICreateSegment(session->sd, &own->segment, id, size, NULL, NULL, 0, &error);
    check(error, "cannot create segment 0x%x of %lu bytes", id, (unsigned long)size);
    SCIPrepareSegment(own->segment, session->adapter, 0, &error);
    check(error, "cannot prepare segment 0x%x", id);
    own->bytes = (volatile unsigned char *)SCIMapLocalSegment(own->segment, &own->map, 0, size,
                                                              NULL, 0, &error);
    check(error, "cannot map segment 0x%x", id);
    SCISetSegmentAvailable(own->segment, session->adapter, 0, &error);
    check(error, "cannot make segment 0x%x available", id);
}

void own_wait_until_left(struct own_segment *own, const struct session *session)
{
    sci_segment_cb_reason_t reason;
    do {
        unsigned int node, adapter;
        sci_error_t error;
        unsigned int timeout =
            session->patience == 0 ? SCI_INFINITE_TIMEOUT : (unsigned int)(session->patience * 1e3);
        reason =
            SCIWaitForLocalSegmentEvent(own->segment, &node, &adapter, timeout, 0, &error);
        check(error, "nobody came, or nobody left");
        if (reason == SCI_CB_LOST)
            fail(SCI_ERR_OK, "the other side is gone");
    } while (reason != SCI_CB_DISCONNECT);
}

void own_remove(struct own_segment *own)
{
    sci_error_t error;
    SCIUnmapSegment(own->map, 0, &error);
    check(error, "cannot unmap the own segment");
    SCIRemoveSegment(own->segment, 0, &error);
    check(error, "cannot remove the own segment");
}

int try_again(const struct session *session, sci_error_t error, double since)
{
    struct timespec moment = {0, 1000000};
    switch (error) {
    case SCI_ERR_NO_SUCH_SEGMENT: /* interrupts: SCI_ERR_NO_SUCH_INTNO is the same */
    case SCI_ERR_CONNECTION_REFUSED:
    case SCI_ERR_TIMEOUT:
    case SCI_ERR_NODE_NOT_RESPONDING:
    case SCI_ERR_NO_REMOTE_LINK_ACCESS:
        break;
    default:
        return 0;
    }
    if (session->patience != 0 && now() - since > session->patience * 1e6)
        return 0;
    nanosleep(&moment, NULL);
    return 1;
}

void peer_connect(struct peer_segment *peer, const struct session *session, unsigned int id)
{
    double since = now();
    sci_error_t error;
    do {
        SCIConnectSegment(session->sd, &peer->segment, session->remote, id, session->adapter, NULL,
                          NULL, 0, 0, &error);
    } while (error != SCI_ERR_OK && try_again(session, error, since));
    check(error, "cannot connect to segment 0x%x of node %u", id, session->remote);
    peer->size = SCIGetRemoteSegmentSize(peer->segment);
    peer->bytes = (volatile unsigned char *)SCIMapRemoteSegment(peer->segment, &peer->map, 0,
                                                                peer->size, NULL, 0, &error);
    check(error, "cannot map segment 0x%x of node %u", id, session->remote);
    SCICreateMapSequence(peer->map, &peer->sequence, 0, &error);
    check(error, "cannot make a sequence for segment 0x%x", id);
}

void peer_check(struct peer_segment *peer)
{
    sci_error_t error;
    sci_sequence_status_t status;
    do {
        status = SCICheckSequence(peer->sequence, 0, &error);
    } while (error == SCI_ERR_OK && status == SCI_SEQ_PENDING);
    check(error, "cannot check the stores");
    if (status != SCI_SEQ_OK)
        fail(SCI_ERR_TRANSFER_FAILED, "the other side's segment is gone");
}

void peer_disconnect(struct peer_segment *peer)
{
    sci_error_t error;
    SCIRemoveSequence(peer->sequence, 0, &error);
    check(error, "cannot remove the sequence");
    SCIUnmapSegment(peer->map, 0, &error);
    check(error, "cannot unmap the other side's segment");
    SCIDisconnectSegment(peer->segment, 0, &error);
    check(error, "cannot disconnect from the other side's segment");
}

uint32_t load_word(const volatile void *address)
{
    return __atomic_load_n((const volatile uint32_t *)address, __ATOMIC_ACQUIRE);
}

void store_word(volatile void *address, uint32_t value)
{
    __atomic_store_n((volatile uint32_t *)address, value, __ATOMIC_RELEASE);
}

/* One spin of many; fails when the session's patience is over. */
static void spin(const struct session *session, unsigned int *spins, double since)
{
    /* Let others run now and then: the other side may share this processor. */
    if (++*spins % 4096 != 0)
        return;
    sched_yield();
    if (session->patience != 0 && now() - since > session->patience * 1e6)
        fail(SCI_ERR_TIMEOUT, "the other side does not answer");
}

void wait_for_word(const struct session *session, const volatile void *address, uint32_t value)
{
    double since = now();
    unsigned int spins = 0;
    while (load_word(address) != value)
        spin(session, &spins, since);
}

uint32_t wait_for_change(const struct session *session, const volatile void *address,
                         uint32_t value)
{
    double since = now();
    unsigned int spins = 0;
    uint32_t found;
    while ((found = load_word(address)) == value)
        spin(session, &spins, since);
    return found;
}

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}
