/*
 * Data interrupts: messages come whole and in order, a full queue says so and loses nothing, and
 * callbacks may do what programs do in them: remove segments, and use the API with the same
 * descriptor.
 */
#include "scenario.h"

#include <string.h>

enum { NUMBER = 12 };

static unsigned char message[SCI_MAX_DATA_INTERRUPT_LENGTH + 1];

static sci_local_data_interrupt_t create(struct scenario *scenario, unsigned int number,
                                         sci_cb_data_interrupt_t callback, void *arg,
                                         unsigned int flags)
{
    sci_local_data_interrupt_t interrupt;
    unsigned int got = number;
    TRY(SCICreateDataInterrupt(scenario->sd, &interrupt, 0, &got, callback, arg,
                               flags | SCI_FLAG_FIXED_INTNO, &error));
    CHECK(got == number);
    return interrupt;
}

static sci_remote_data_interrupt_t connect_to(struct scenario *scenario, unsigned int number)
{
    sci_remote_data_interrupt_t interrupt;
    POLL(SCI_ERR_NO_SUCH_INTNO, SCIConnectDataInterrupt(scenario->sd, &interrupt, scenario->peer, 0,
                                                        number, 0, 0, &error));
    return interrupt;
}

/* A message says its number and its length, and its bytes follow from both. */
static void fill(uint32_t number, unsigned int length)
{
    unsigned int i;
    for (i = 0; i < length; i++)
        message[i] = (unsigned char)(number * 31 + i);
    memcpy(message, &number, sizeof number);
}

static void check_message(uint32_t number, unsigned int length, unsigned int got)
{
    uint32_t said;
    unsigned int i;
    CHECK(got == length);
    memcpy(&said, message, sizeof said);
    if (said != number)
        scenario_fail(__FILE__, __LINE__, "message %u came instead of %u", said, number);
    for (i = sizeof said; i < length; i++)
        CHECK(message[i] == (unsigned char)(number * 31 + i));
}

/* Lengths from 4 bytes to the longest, by turns. */
static unsigned int length_of(uint32_t number)
{
    static const unsigned int lengths[] = {4, 60, 100, SCI_MAX_DATA_INTERRUPT_LENGTH, 13};
    return lengths[number % 5];
}

static void in_order(struct scenario *scenario)
{
    enum { COUNT = 2000 };
    uint32_t number;
    if (scenario->owner) {
        sci_local_data_interrupt_t interrupt;
        unsigned int got = sizeof message;
        scenario_meet(scenario); /* there is none yet */
        interrupt = create(scenario, NUMBER, NULL, NULL, 0);
        REFUSED(SCI_ERR_TIMEOUT,
                SCIWaitForDataInterrupt(interrupt, message, &got, 0, 0, &error));
        scenario_meet(scenario);
        for (number = 0; number < COUNT; number++) {
            got = sizeof message;
            TRY(SCIWaitForDataInterrupt(interrupt, message, &got, SOON, 0, &error));
            check_message(number, length_of(number), got);
        }
        TRY(SCIRemoveDataInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_data_interrupt_t interrupt;
        REFUSED(SCI_ERR_NO_SUCH_INTNO,
                SCIConnectDataInterrupt(scenario->sd, &interrupt, scenario->peer, 0, NUMBER, 0, 0,
                                        &error));
        scenario_meet(scenario);
        scenario_meet(scenario); /* the owner has seen that nothing is there */
        interrupt = connect_to(scenario, NUMBER);
        for (number = 0; number < COUNT; number++) {
            fill(number, length_of(number));
            POLL(SCI_ERR_NOSPC, SCITriggerDataInterrupt(interrupt, message, length_of(number), 0,
                                                        &error));
        }
        TRY(SCIDisconnectDataInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

/* Nobody reads: at some point the queue is full, and what was taken comes out whole. */
static void full(struct scenario *scenario)
{
    enum { MANY = 100000 };
    uint32_t number, sent = 0;
    if (scenario->owner) {
        sci_local_data_interrupt_t interrupt = create(scenario, 0, NULL, NULL, 0);
        unsigned int got;
        scenario_meet(scenario);
        sent = scenario_receive(scenario, 1);
        CHECK(sent >= 2);
        /* Too little room: the message stays, to be read with more. */
        got = 8;
        REFUSED(SCI_ERR_NOSPC, SCIWaitForDataInterrupt(interrupt, message, &got, SOON, 0, &error));
        for (number = 0; number < sent; number++) {
            got = sizeof message;
            TRY(SCIWaitForDataInterrupt(interrupt, message, &got, SOON, 0, &error));
            check_message(number, 60, got);
        }
        got = sizeof message;
        REFUSED(SCI_ERR_TIMEOUT,
                SCIWaitForDataInterrupt(interrupt, message, &got, 10, 0, &error));
        scenario_meet(scenario); /* there is room again */
        TRY(SCIWaitForDataInterrupt(interrupt, message, &got, SOON, 0, &error));
        check_message(4711, 60, got);
        TRY(SCIRemoveDataInterrupt(interrupt, 0, &error));
        scenario_meet(scenario);
    } else {
        sci_remote_data_interrupt_t interrupt;
        scenario_meet(scenario);
        interrupt = connect_to(scenario, 0);
        for (sent = 0; sent < MANY; sent++) {
            fill(sent, 60);
            error = NOT_SET;
            SCITriggerDataInterrupt(interrupt, message, 60, 0, &error);
            if (error != SCI_ERR_OK)
                break;
        }
        CHECK(sent < MANY && error == SCI_ERR_NOSPC);
        REFUSED_SOMEHOW(SCITriggerDataInterrupt(interrupt, message,
                                                SCI_MAX_DATA_INTERRUPT_LENGTH + 1, 0, &error));
        scenario_send(scenario, 1, sent);
        scenario_meet(scenario);
        fill(4711, 60);
        TRY(SCITriggerDataInterrupt(interrupt, message, 60, 0, &error));
        scenario_meet(scenario);
        /* What it led to is gone: a posted write. */
        TRY(SCITriggerDataInterrupt(interrupt, message, 60, 0, &error));
        TRY(SCIDisconnectDataInterrupt(interrupt, 0, &error));
    }
}

/* What a callback needs, and what it has seen. */
struct listener {
    struct scenario *scenario;
    sci_local_segment_t segment;
    sci_remote_data_interrupt_t back;
    uint32_t count;
};

/* Answers each message with the same; at the third one it removes a segment, and makes another. */
static sci_callback_action_t on_message(void *arg, sci_local_data_interrupt_t interrupt, void *data,
                                        unsigned int length, sci_error_t status)
{
    struct listener *listener = (struct listener *)arg;
    sci_error_t inside;
    CALLED();
    CHECK(interrupt != NULL && status == SCI_ERR_OK && length == 64);
    if (listener->count == 0) {
        unsigned int number;
        sci_remote_data_interrupt_t back;
        memcpy(&number, (unsigned char *)data + 4, sizeof number);
        do {
            SCIConnectDataInterrupt(listener->scenario->sd, &back, listener->scenario->peer, 0, number,
                                    SOON, 0, &inside);
        } while (inside == SCI_ERR_NO_SUCH_INTNO);
        scenario_expect(__FILE__, __LINE__, "connecting in a callback", inside, SCI_ERR_OK);
        listener->back = back;
    }
    if (listener->count == 2) {
        SCIRemoveSegment(listener->segment, 0, &inside);
        scenario_expect(__FILE__, __LINE__, "removing in a callback", inside, SCI_ERR_OK);
        SCICreateSegment(listener->scenario->sd, &listener->segment, 0xca11, 32, NULL, NULL, 0,
                         &inside);
        scenario_expect(__FILE__, __LINE__, "creating in a callback", inside, SCI_ERR_OK);
        SCIPrepareSegment(listener->segment, 0, 0, &inside);
        scenario_expect(__FILE__, __LINE__, "preparing in a callback", inside, SCI_ERR_OK);
    }
    SCITriggerDataInterrupt(listener->back, data, length, 0, &inside);
    scenario_expect(__FILE__, __LINE__, "triggering in a callback", inside, SCI_ERR_OK);
    if (listener->count == 3) {
        SCIDisconnectDataInterrupt(listener->back, 0, &inside);
        scenario_expect(__FILE__, __LINE__, "disconnecting in a callback", inside, SCI_ERR_OK);
    }
    __atomic_add_fetch(&listener->count, 1, __ATOMIC_SEQ_CST);
    return SCI_CALLBACK_CONTINUE;
}

static void called_back(struct scenario *scenario)
{
    enum { COUNT = 4 };
    if (scenario->owner) {
        static struct listener listener;
        sci_local_data_interrupt_t interrupt;
        listener.scenario = scenario;
        TRY(SCICreateSegment(scenario->sd, &listener.segment, 0xca11, 16, NULL, NULL, 0, &error));
        interrupt = create(scenario, NUMBER, on_message, &listener, SCI_FLAG_USE_CALLBACK);
        scenario_meet(scenario);
        AWAIT(__atomic_load_n(&listener.count, __ATOMIC_SEQ_CST) == COUNT);
        CHECK(SCIGetLocalSegmentSize(listener.segment) == 32);
        TRY(SCIRemoveSegment(listener.segment, 0, &error));
        TRY(SCIRemoveDataInterrupt(interrupt, 0, &error));
    } else {
        sci_local_data_interrupt_t answers;
        sci_remote_data_interrupt_t interrupt;
        unsigned int number = 0xdeadbeefU, got;
        uint32_t i;
        TRY(SCICreateDataInterrupt(scenario->sd, &answers, 0, &number, NULL, NULL, 0, &error));
        scenario_meet(scenario);
        interrupt = connect_to(scenario, NUMBER);
        for (i = 0; i < COUNT; i++) {
            unsigned char sent[64];
            fill(i, 64);
            memcpy(message + 4, &number, sizeof number);
            memcpy(sent, message, sizeof sent);
            TRY(SCITriggerDataInterrupt(interrupt, message, 64, 0, &error));
            got = sizeof message;
            TRY(SCIWaitForDataInterrupt(answers, message, &got, SOON, 0, &error));
            CHECK(got == 64 && memcmp(message, sent, 64) == 0);
        }
        TRY(SCIDisconnectDataInterrupt(interrupt, 0, &error));
        TRY(SCIRemoveDataInterrupt(answers, 0, &error));
    }
    scenario_meet(scenario);
}

/* A number of a plain interrupt is free for a data interrupt, but not for a second one. */
static void numbers(struct scenario *scenario)
{
    sci_local_data_interrupt_t data = create(scenario, 7, NULL, NULL, 0), second;
    sci_local_interrupt_t plain;
    unsigned int number = 7;
    TRY(SCICreateInterrupt(scenario->sd, &plain, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO,
                           &error));
    REFUSED_SOMEHOW(SCICreateDataInterrupt(scenario->sd, &second, 0, &number, NULL, NULL,
                                           SCI_FLAG_FIXED_INTNO, &error));
    TRY(SCIRemoveInterrupt(plain, 0, &error));
    TRY(SCIRemoveDataInterrupt(data, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    in_order(&scenario);
    full(&scenario);
    called_back(&scenario);
    if (scenario.owner) /* both may be on one host */
        numbers(&scenario);
    scenario_end(&scenario);
    return 0;
}
