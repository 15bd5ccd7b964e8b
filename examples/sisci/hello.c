/* hello.c: one program, two hosts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "sisci_api.h"

#define SEGMENT 4711
#define SIZE 4096

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    sci_map_t map;
    unsigned int remote = argc > 1 ? (unsigned int)atoi(argv[1]) : 0;

    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK) SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK) { fprintf(stderr, "%s\n", SCIGetErrorString(error)); return 1; }

    if (remote == 0) {                                  /* the receiver */
        sci_local_segment_t segment;
        volatile char *text;
        SCICreateSegment(sd, &segment, SEGMENT, SIZE, NULL, NULL, 0, &error);
        text = SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        SCIPrepareSegment(segment, 0, 0, &error);
        SCISetSegmentAvailable(segment, 0, 0, &error);
        while (text[0] == 0) { }
        printf("received: %s\n", (const char *)text + 1);
    } else {                                            /* the sender */
        sci_remote_segment_t segment;
        volatile char *text;
        do {
            SCIConnectSegment(sd, &segment, remote, SEGMENT, 0, NULL, NULL,
                              SCI_INFINITE_TIMEOUT, 0, &error);
        } while (error == SCI_ERR_NO_SUCH_SEGMENT);
        if (error != SCI_ERR_OK) { fprintf(stderr, "%s\n", SCIGetErrorString(error)); return 1; }
        text = SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        strcpy((char *)text + 1, "stored by another host");
        SCIFlush(NULL, 0);
        text[0] = 1;
    }
    SCITerminate();
    return 0;
}
