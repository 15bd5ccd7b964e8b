/*
 * Half a round trip by eventfds between two processes of one machine: what a signal costs there at least.
 *
 * usage: events ROUNDS    prints a JSON object
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

static void give(int event)
{
    uint64_t one = 1;
    if (write(event, &one, sizeof one) != sizeof one)
        exit(1);
}

static void take(int event)
{
    uint64_t count;
    if (read(event, &count, sizeof count) != sizeof count)
        exit(1);
}

int main(int argc, char **argv)
{
    int rounds = argc == 2 ? atoi(argv[1]) : 0, there = eventfd(0, 0), back = eventfd(0, 0);
    if (rounds <= 0 || there < 0 || back < 0)
        return 2;
    if (fork() == 0) {
        for (int round = 0; round < rounds; round++) {
            take(there);
            give(back);
        }
        return 0;
    }
    double begun = now();
    for (int round = 0; round < rounds; round++) {
        give(there);
        take(back);
    }
    printf("{\"us\": %.3f}\n", (now() - begun) / rounds / 2);
    return wait(NULL) < 0;
}
