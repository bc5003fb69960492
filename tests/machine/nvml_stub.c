/* A stand-in for the NVIDIA driver's libnvidia-ml.so.1: answers from a scenario file, fails on demand.
 *
 * The file is named by NVML_STUB_SCENARIO and read at every nvmlInit; its lines are
 *
 *     init CODE                                what nvmlInitWithFlags returns
 *     fail FUNCTION CODE                       what a function without a card returns
 *     driver TEXT
 *     cuda NUMBER
 *     card                                     begins a card; all lines below belong to it:
 *     text name|uuid|bus TEXT
 *     number KEY VALUE                         see `struct card`
 *     used BYTES BYTES ...                     used memory at the first, second, ... question (the last stays)
 *     error FUNCTION CODE                      what that function returns for this card
 *     lost_after COUNT                         from the COUNT-th question on the card is lost
 *     growing COUNT                            so many times the process list outgrows the caller's room
 *     process compute|graphics PID BYTES
 *
 * Where NVML_STUB_LOG names a file, every open and close is noted there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15
};
enum { MAX_CARDS = 8, MAX_ERRORS = 64, MAX_PROCESSES = 64, MAX_USED = 64, TEXT = 128 };

struct failure { char function[TEXT]; int code; };
struct process { int graphics; unsigned pid; unsigned long long used; };
struct memory_v1 { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process_info { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
struct temperature { unsigned version, sensor; int celsius; };
struct pci_info {
    char legacy_bus[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
};

struct card {
    char name[TEXT], uuid[TEXT], bus[TEXT];
    unsigned long long total, reserved, used[MAX_USED], reasons;
    int used_count, used_asked;
    unsigned gen, gen_max, width, width_max, major, minor, draw, limit, limit_default;
    unsigned sm, sm_max, mem, mem_max, temperature, ecc, mig, persistence;
    struct failure errors[MAX_ERRORS];
    int error_count, lost_after, asked, growing;
    struct process processes[MAX_PROCESSES];
    int process_count;
};

static struct card cards[MAX_CARDS];
static int card_count, opened, cuda, init_code, fail_count;
static char driver[TEXT];
static struct failure fails[MAX_ERRORS];

static void note(const char *what) {
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}

static void copy(char *to, const char *from) {
    strncpy(to, from, TEXT - 1);
    to[TEXT - 1] = 0;
}

static void set_number(struct card *card, const char *key, unsigned long long value) {
    struct { const char *key; unsigned *field; } known[] = {
        {"gen", &card->gen}, {"gen_max", &card->gen_max}, {"width", &card->width}, {"width_max", &card->width_max},
        {"major", &card->major}, {"minor", &card->minor}, {"draw", &card->draw}, {"limit", &card->limit},
        {"limit_default", &card->limit_default}, {"sm", &card->sm}, {"sm_max", &card->sm_max}, {"mem", &card->mem},
        {"mem_max", &card->mem_max}, {"temperature", &card->temperature}, {"ecc", &card->ecc}, {"mig", &card->mig},
        {"persistence", &card->persistence},
    };
    if (!strcmp(key, "total")) card->total = value;
    else if (!strcmp(key, "reserved")) card->reserved = value;
    else if (!strcmp(key, "reasons")) card->reasons = value;
    else
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (!strcmp(key, known[i].key)) *known[i].field = (unsigned)value;
}

static void set_card_line(struct card *card, char *line) {
    char word[TEXT], text[1024];
    int code, used;
    unsigned long long value;
    if (sscanf(line, "text %127s %1023[^\n]", word, text) == 2)
        copy(!strcmp(word, "name") ? card->name : !strcmp(word, "uuid") ? card->uuid : card->bus, text);
    else if (sscanf(line, "number %127s %llu", word, &value) == 2)
        set_number(card, word, value);
    else if (!strncmp(line, "used ", 5))
        for (line += 5; sscanf(line, "%llu%n", &value, &used) == 1 && card->used_count < MAX_USED; line += used)
            card->used[card->used_count++] = value;
    else if (sscanf(line, "error %127s %d", word, &code) == 2 && card->error_count < MAX_ERRORS) {
        copy(card->errors[card->error_count].function, word);
        card->errors[card->error_count++].code = code;
    } else if (sscanf(line, "lost_after %d", &code) == 1)
        card->lost_after = code;
    else if (sscanf(line, "growing %d", &code) == 1)
        card->growing = code;
    else if (sscanf(line, "process %127s %d %llu", word, &code, &value) == 3 && card->process_count < MAX_PROCESSES)
        card->processes[card->process_count++] =
            (struct process){!strcmp(word, "graphics"), (unsigned)code, value};
}

static void read_scenario(void) {
    const char *path = getenv("NVML_STUB_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[4096], word[TEXT];
    int code;
    card_count = cuda = init_code = fail_count = 0;
    driver[0] = 0;
    memset(cards, 0, sizeof cards);
    while (file && fgets(line, sizeof line, file)) {
        if (!strncmp(line, "card", 4) && card_count < MAX_CARDS) cards[card_count++].lost_after = -1;
        else if (card_count) set_card_line(&cards[card_count - 1], line);
        else if (sscanf(line, "init %d", &init_code) == 1 || sscanf(line, "cuda %d", &cuda) == 1) continue;
        else if (sscanf(line, "driver %127[^\n]", driver) == 1) continue;
        else if (sscanf(line, "fail %127s %d", word, &code) == 2 && fail_count < MAX_ERRORS) {
            copy(fails[fail_count].function, word);
            fails[fail_count++].code = code;
        }
    }
    if (file) fclose(file);
}

static int system_code(const char *function) {
    if (!opened) return UNINITIALIZED;
    for (int i = 0; i < fail_count; i++)
        if (!strcmp(fails[i].function, function)) return fails[i].code;
    return SUCCESS;
}

static int card_code(struct card *card, const char *function) {
    if (!opened) return UNINITIALIZED;
    if (card->lost_after >= 0 && card->asked++ >= card->lost_after) return GPU_IS_LOST;
    for (int i = 0; i < card->error_count; i++)
        if (!strcmp(card->errors[i].function, function)) return card->errors[i].code;
    return SUCCESS;
}

#define SYSTEM() do { int code_ = system_code(__func__); if (code_) return code_; } while (0)
#define CARD() do { int code_ = card_code(card, __func__); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!opened) read_scenario();
    if (init_code) return init_code;
    opened++;
    note("open");
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!opened) return UNINITIALIZED;
    opened--;
    note("close");
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[TEXT];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

static int put(char *to, unsigned room, const char *text) {
    if (strlen(text) >= room) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned room) { SYSTEM(); return put(text, room, driver); }
int nvmlSystemGetCudaDriverVersion(int *version) { SYSTEM(); *version = cuda; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { SYSTEM(); *version = cuda; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { SYSTEM(); *count = (unsigned)card_count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct card **handle) {
    SYSTEM();
    if (index >= (unsigned)card_count) return INVALID_ARGUMENT;
    struct card *card = &cards[index];
    CARD();
    *handle = card;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct card **handle) {
    SYSTEM();
    for (int i = 0; i < card_count; i++)
        if (!strcmp(cards[i].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    return NOT_FOUND;
}

int nvmlDeviceGetName(struct card *card, char *text, unsigned room) { CARD(); return put(text, room, card->name); }
int nvmlDeviceGetUUID(struct card *card, char *text, unsigned room) { CARD(); return put(text, room, card->uuid); }

int nvmlDeviceGetPciInfo_v3(struct card *card, struct pci_info *info) {
    CARD();
    memset(info, 0, sizeof *info);
    strncpy(info->bus_id, card->bus, sizeof info->bus_id - 1);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct card *card, int *major, int *minor) {
    CARD();
    *major = (int)card->major;
    *minor = (int)card->minor;
    return SUCCESS;
}

static unsigned long long used_now(struct card *card) {
    if (!card->used_count) return 0;
    int last = card->used_count - 1;
    int at = card->used_asked < last ? card->used_asked++ : last;
    return card->used[at];
}

int nvmlDeviceGetMemoryInfo(struct card *card, struct memory_v1 *memory) {
    CARD();
    memory->total = card->total;
    memory->used = used_now(card) + card->reserved;
    memory->free = card->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *memory) {
    CARD();
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = card->total;
    memory->used = used_now(card);
    memory->reserved = card->reserved;
    memory->free = card->total - card->reserved - memory->used;
    return SUCCESS;
}

#define NUMBER(function, field) \
    int function(struct card *card, unsigned *value) { CARD(); *value = card->field; return SUCCESS; }
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, gen)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, gen_max)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, width_max)
NUMBER(nvmlDeviceGetPowerUsage, draw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, limit)
NUMBER(nvmlDeviceGetPowerManagementLimit, limit)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, limit_default)
NUMBER(nvmlDeviceGetPersistenceMode, persistence)

int nvmlDeviceGetClockInfo(struct card *card, unsigned clock, unsigned *mhz) {
    CARD();
    *mhz = clock == 2 ? card->mem : card->sm;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(struct card *card, unsigned clock, unsigned *mhz) {
    CARD();
    *mhz = clock == 2 ? card->mem_max : card->sm_max;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(struct card *card, unsigned long long *reasons) {
    CARD();
    *reasons = card->reasons;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct card *card, unsigned long long *reasons) {
    CARD();
    *reasons = card->reasons;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(struct card *card, struct temperature *temperature) {
    CARD();
    temperature->celsius = (int)card->temperature;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(struct card *card, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    CARD();
    *celsius = card->temperature;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(struct card *card, unsigned *current, unsigned *pending) {
    CARD();
    *current = *pending = card->ecc;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct card *card, unsigned *current, unsigned *pending) {
    CARD();
    *current = *pending = card->mig;
    return SUCCESS;
}

static int list(struct card *card, int graphics, unsigned *count, struct process_info *infos) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < card->process_count; i++) found += card->processes[i].graphics == graphics;
    *count = found;
    if (!found) return SUCCESS;
    if (infos && card->growing > 0) {
        card->growing--;
        *count = room + 1;
        return INSUFFICIENT_SIZE;
    }
    if (!infos || room < found) return INSUFFICIENT_SIZE;
    for (int i = 0, at = 0; i < card->process_count; i++)
        if (card->processes[i].graphics == graphics)
            infos[at++] = (struct process_info){card->processes[i].pid, card->processes[i].used, ~0u, ~0u};
    return SUCCESS;
}

#define LIST(function, graphics) \
    int function(struct card *card, unsigned *count, struct process_info *infos) { \
        CARD(); \
        return list(card, graphics, count, infos); \
    }
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 0)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, 0)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 1)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 1)
