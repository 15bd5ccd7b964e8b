/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The module's parts and what they have in common.
 *
 *   device.c    /dev/rackbus
 *   ntb.c       the NTB that functions are behind: registers, link, vectors
 *   function.c  a borrowed function: its watch, its loss, its end
 *   borrow.c    how it comes, return.c how it is given back
 *   users.c     who uses its disks, which a return asks
 *   bus.c       its root bus, configuration space, and ring of requests
 *   irq.c       its interrupts
 *   dma.c       its DMA by this host's drivers
 *   iommu.c     its IOMMU, by which VFIO has it
 *   window.c, config.c   what the lender says, checked (no hardware)
 *
 * Locks, outer ones first: pci_lock_rescan_remove(), the NTB's device_lock(),
 * those of the kernel's IOMMU groups and of VFIO, a function's reach_lock, the
 * NTB's close_lock, rackbus_lock, pci_bus_sem.  A function's config_lock and msi_lock are for
 * interrupt context and have nothing inside.
 */
#ifndef _RACKBUS_INTERNAL_H
#define _RACKBUS_INTERNAL_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/cpumask.h>
#include <linux/kref.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/msi.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "config.h"
#include "uapi/linux/rackbus.h"
#include "window.h"

struct rackbus_ntb {
	struct pci_dev *pdev;
	void __iomem *regs;
	resource_size_t window;		/* window 1 in this host */
	u64 window_size;
	unsigned int link_irq;
	struct work_struct link_work;
	unsigned int vectors;		/* for functions */
	DECLARE_BITMAP(used, RACKBUS_NTB_VECTORS);	/* device_lock() */
	struct mutex close_lock;
	bool closed;			/* written under it */
};

struct rackbus_domain;
struct rackbus_function;

/* One interrupt of a function, and the NTB's vector by which it comes. */
struct rackbus_vector {
	struct rackbus_function *function;
	unsigned int index;		/* at the NTB */
	unsigned int ntb_irq;
	unsigned int irq;		/* the function's; 0: none is set up */
	struct msi_msg message;		/* of the NTB's vector */
	bool moves;			/* to the processors that are wanted */
	cpumask_var_t wanted;
	cpumask_var_t moving;		/* of the work alone */
	atomic64_t count;
};

struct rackbus_function {
	struct pci_sysdata sysdata;	/* to_rackbus_function() */
	struct kref ref;
	struct rackbus_ntb *ntb;	/* until it is detached */
	struct device *dma_device;	/* the NTB's, as long as it is itself */
	bool dma_gone;			/* that one has left this host */
	struct list_head alive;		/* alive_lock */

	/* Constant since it was borrowed. */
	u32 handle;
	char name[RACKBUS_NAME_SIZE];
	struct rackbus_address address;
	struct rackbus_offer offer;
	unsigned int vectors;

	/* rackbus_lock */
	struct list_head entry;
	enum rackbus_state state;
	enum rackbus_reason reason;
	struct pci_bus *bus;		/* NULL: is away, or on its way */
	struct pci_dev *leaving;	/* with a reference, while on its way */
	bool probed;			/* a driver is being bound just now */
	const char *held;		/* rackbus_hold_off() */
	struct completion tried;	/* a driver was looked for */
	ktime_t lost_at;
	u32 removal_ms;

	/* config_lock */
	raw_spinlock_t config_lock;
	struct rackbus_config *config;
	void __iomem *header;
	void __iomem *ring;
	u32 producer;
	u32 consumer;
	bool resetting;
	u32 reset_after;		/* done when consumer is here */
	bool reset_answered;		/* the lender may refuse it */
	bool gone;			/* nothing is said or asked any more */

	/* reach_lock: what it reaches of this host, which takes long to change */
	struct mutex reach_lock;
	bool isolated;			/* written under it */
	struct rackbus_domain *domain;	/* what is mapped, if anything is */
	bool unreached;			/* it reaches nothing any more, surely */

	struct resource bus_range;
	struct resource windows[RACKBUS_BARS];

	struct fwnode_handle *fwnode;
	struct irq_domain *irq_domain;
	struct msi_domain_info *msi_info;
	raw_spinlock_t msi_lock;	/* vector[], and the MSI-X entries */
	struct work_struct moves;
	struct rackbus_vector vector[RACKBUS_NTB_VECTORS];

	struct delayed_work watch;
	u32 heartbeat;
	u32 unchanged;			/* looks in a row */
	ktime_t heartbeat_at;
	struct work_struct removal;
	struct completion away;

	atomic64_t heartbeats;
	atomic64_t heartbeats_missed;
	atomic64_t writes_forwarded;
	atomic64_t writes_lost;
	atomic64_t waits_late;
	atomic64_t resets;
	atomic64_t dma_refused;
	atomic64_t interrupts_stray;
};

static inline struct rackbus_function *to_rackbus_function(struct pci_bus *bus)
{
	return container_of((struct pci_sysdata *)bus->sysdata,
			    struct rackbus_function, sysdata);
}

/* Of a device on such a bus: rackbus_is_function(). */
static inline struct rackbus_function *rackbus_function_of(struct device *dev)
{
	return to_rackbus_function(to_pci_dev(dev)->bus);
}

/* main.c */
extern struct mutex rackbus_lock;
extern struct workqueue_struct *rackbus_watches;
extern struct workqueue_struct *rackbus_removals;
extern unsigned int rackbus_silence_ms;

/* device.c */
int rackbus_device_register(void);
void rackbus_device_unregister(void);
void rackbus_changed(void);

/* ntb.c */
extern struct pci_driver rackbus_ntb_driver;
bool rackbus_ntb_link_up(struct rackbus_ntb *ntb);
void rackbus_ntb_ring(struct rackbus_ntb *ntb, u32 doorbell);
void rackbus_ntb_close(struct rackbus_ntb *ntb);
int rackbus_ntb_vectors_get(struct rackbus_ntb *ntb,
			    struct rackbus_function *fn, unsigned int wanted);
void rackbus_ntb_vectors_put(struct rackbus_ntb *ntb,
			     struct rackbus_function *fn);

/* function.c */
extern struct list_head rackbus_functions;
struct rackbus_function *
rackbus_function_make(const struct rackbus_borrow *borrow, struct pci_dev *ntb);
void rackbus_function_put(struct rackbus_function *fn);
bool rackbus_overlaps(struct rackbus_function *fn);
int rackbus_enter(struct rackbus_function *fn);
void rackbus_leave(struct rackbus_function *fn);
void rackbus_let_unload(void);
struct rackbus_function *rackbus_find(u32 handle);
struct pci_dev *rackbus_device(struct rackbus_function *fn);
void rackbus_take_away(struct rackbus_function *fn, enum rackbus_state state);
void rackbus_lose_locked(struct rackbus_function *fn,
			 enum rackbus_reason reason);
void rackbus_lose(struct rackbus_function *fn, enum rackbus_reason reason);
void rackbus_lose_all(struct rackbus_ntb *ntb, enum rackbus_reason reason);
bool rackbus_has_ended(struct rackbus_function *fn, unsigned long until);
void rackbus_ntb_gone(struct device *ntb);
void rackbus_probing(struct rackbus_function *fn, struct pci_dev *pdev,
		     bool probed);
void rackbus_detach_all(struct rackbus_ntb *ntb);
void rackbus_quiesce_all(struct rackbus_ntb *ntb);
bool rackbus_any(void);
bool rackbus_any_behind(struct rackbus_ntb *ntb);

/* borrow.c */
int rackbus_borrow(struct rackbus_borrow *borrow);
void rackbus_close(struct rackbus_function *fn);

/* return.c */
int rackbus_return(u32 handle, bool force, unsigned int timeout_ms);
void rackbus_return_all(void);
int rackbus_lost(u32 handle);
u32 rackbus_list(u32 *handles, u32 capacity);
int rackbus_status(struct rackbus_status *status);

/* users.c */
int rackbus_look_at_disks(struct rackbus_function *fn, struct list_head *disks);
int rackbus_claim_disks(struct list_head *disks);
void rackbus_release_disks(struct list_head *disks, bool all);

/* bus.c */
extern struct notifier_block rackbus_bus_notifier;
bool rackbus_is_function(struct device *dev);
int rackbus_ask(struct rackbus_function *fn, u32 kind, u32 value,
		const struct rackbus_window_mapping *what);
int rackbus_bus_create(struct rackbus_function *fn);
void rackbus_bus_remove(struct rackbus_function *fn, struct pci_bus *bus);
unsigned long rackbus_answer_time(void);
unsigned long rackbus_release_time(void);
void rackbus_release_request(struct rackbus_function *fn, unsigned long until);
void rackbus_silence(struct rackbus_function *fn);
void rackbus_wait_for_bridges(void);

/* irq.c */
int rackbus_irq_create(struct rackbus_function *fn);
void rackbus_irq_remove(struct rackbus_function *fn);

/* iommu.c */
int rackbus_iommu_register(void);
void rackbus_iommu_unregister(void);

/* dma.c */
bool rackbus_dma_is_translated(struct device *ntb);
extern const struct dma_map_ops rackbus_dma_ops;

#endif /* _RACKBUS_INTERNAL_H */
