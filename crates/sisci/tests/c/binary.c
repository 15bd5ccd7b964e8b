/*
 * Programs that were compiled elsewhere: their headers gave every function another name, one for
 * programs with threads and one for those without, and made every flag a variable of the library.
 * Some look all of that up by name when they run.
 */
#include "functions.h"
#include "scenario.h"

#include <dlfcn.h>

#ifdef __cplusplus
extern "C" {
#endif
/* As such headers declare them. */
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_FLAG_AUTO_ID;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_FLAG_FIXED_INTNO;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_INFINITE_TIMEOUT;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_Q_ADAPTER;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_Q_ADAPTER_NODEID;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MEM_NODEID;
extern const unsigned int _SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MBX_NODEID;
extern const unsigned int _SISCI_PUBLIC_CONST_WRITE_BACK_CACHE_MAP;
void _SISCI_PUBLIC_FUNC_ST_SCIInitialize(unsigned int flags, sci_error_t *error);
void _SISCI_PUBLIC_FUNC_MT_SCITerminate(void);
void _SISCI_PUBLIC_FUNC_MT_SCIOpen(sci_desc_t *sd, unsigned int flags, sci_error_t *error);
void _SISCI_PUBLIC_FUNC_ST_SCIClose(sci_desc_t sd, unsigned int flags, sci_error_t *error);
void _SISCI_PUBLIC_FUNC_MT_SCIQuery(unsigned int command, void *data, unsigned int flags,
                                    sci_error_t *error);
void _SISCI_PUBLIC_FUNC_ST_SCICreateSegment(sci_desc_t sd, sci_local_segment_t *segment,
                                            unsigned int id, size_t size,
                                            sci_cb_local_segment_t callback, void *arg,
                                            unsigned int flags, sci_error_t *error);
void _SISCI_PUBLIC_FUNC_MT_SCIRemoveSegment(sci_local_segment_t segment, unsigned int flags,
                                            sci_error_t *error);
#ifdef __cplusplus
}
#endif

#define NAME(name) #name,
static const char *const NAMES[] = {EVERY_FUNCTION(NAME) NULL};

static const char *joined(const char *first, const char *second)
{
    static char text[128];
    size_t length = 0;
    for (; *first != '\0'; first++)
        text[length++] = *first;
    for (; *second != '\0'; second++)
        text[length++] = *second;
    text[length] = '\0';
    return text;
}

static void looked_up(void)
{
    static const char *const prefixes[] = {"", "_SISCI_PUBLIC_FUNC_ST_", "_SISCI_PUBLIC_FUNC_MT_"};
    void *library = dlopen("libsisci.so", RTLD_NOW);
    const char *const *name;
    int prefix;
    CHECK(library != NULL);
    for (name = NAMES; *name != NULL; name++) {
        for (prefix = 0; prefix < 3; prefix++) {
            const char *full = joined(prefixes[prefix], *name);
            if (dlsym(library, full) == NULL)
                scenario_fail(__FILE__, __LINE__, "the library has no %s", full);
        }
    }
    CHECK(dlclose(library) == 0);
}

static void called(void)
{
    sci_desc_t sd;
    sci_local_segment_t segment;
    sci_query_adapter_t query;
    unsigned int node = 0;
    TRY(_SISCI_PUBLIC_FUNC_ST_SCIInitialize(0, &error));
    TRY(_SISCI_PUBLIC_FUNC_MT_SCIOpen(&sd, 0, &error));
    TRY(_SISCI_PUBLIC_FUNC_ST_SCICreateSegment(sd, &segment, 1, 64, NULL, NULL,
                                               _SISCI_PUBLIC_CONST_SCI_FLAG_AUTO_ID, &error));
    query.localAdapterNo = query.portNo = 0;
    query.subcommand = _SISCI_PUBLIC_CONST_SCI_Q_ADAPTER_NODEID;
    query.data = &node;
    TRY(_SISCI_PUBLIC_FUNC_MT_SCIQuery(_SISCI_PUBLIC_CONST_SCI_Q_ADAPTER, &query, 0, &error));
    CHECK(node != 0);
    TRY(_SISCI_PUBLIC_FUNC_MT_SCIRemoveSegment(segment, 0, &error));
    TRY(_SISCI_PUBLIC_FUNC_ST_SCIClose(sd, 0, &error));
    _SISCI_PUBLIC_FUNC_MT_SCITerminate();
}

int main(void)
{
    CHECK(_SISCI_PUBLIC_CONST_SCI_FLAG_FIXED_INTNO == SCI_FLAG_FIXED_INTNO);
    CHECK(_SISCI_PUBLIC_CONST_SCI_INFINITE_TIMEOUT == SCI_INFINITE_TIMEOUT);
    /* These three have odd names. */
    CHECK(_SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MEM_NODEID == SCI_Q_ADAPTER_PHYS_MEM_NODEID);
    CHECK(_SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MBX_NODEID == SCI_Q_ADAPTER_PHYS_MBX_NODEID);
    CHECK(_SISCI_PUBLIC_CONST_WRITE_BACK_CACHE_MAP == SCI_FLAG_WRITE_BACK_CACHE_MAP);
    looked_up();
    called();
    return 0;
}
