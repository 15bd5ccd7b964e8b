// SPDX-License-Identifier: GPL-2.0
/*
 * Borrowed functions, from RACKBUS_BORROW to RACKBUS_RETURN or the lender's
 * death.
 *
 * A function goes away once: whoever takes fn->bus from it (rackbus_lock) does
 * it, with the NTB's device_lock().  That is a work of its own, which unbinds
 * the driver first, without any lock, as that may take as long as the driver
 * likes; or the NTB's driver when it is unbound itself, which cannot wait for a
 * work that wants locks that its caller has.
 */
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "internal.h"

/* Looks at the heartbeat within the time that it may stand still. */
#define LOOKS			4

LIST_HEAD(rackbus_functions);		/* rackbus_lock, as all here */
static unsigned int function_count;
static u32 last_handle;

/* All, also those that are returned and that somebody has memory of. */
static LIST_HEAD(alive);
static DEFINE_SPINLOCK(alive_lock);

static void rackbus_function_release(struct kref *ref)
{
	struct rackbus_function *fn =
		container_of(ref, struct rackbus_function, ref);
	unsigned long flags;

	spin_lock_irqsave(&alive_lock, flags);
	list_del(&fn->alive);
	spin_unlock_irqrestore(&alive_lock, flags);
	put_device(fn->dma_device);
	kfree(fn->config);
	kfree(fn->held);
	kfree(fn);
}

void rackbus_function_put(struct rackbus_function *fn)
{
	kref_put(&fn->ref, rackbus_function_release);
}

/*
 * An NTB is leaving this host, after its functions, and its IOMMU's mappings
 * next: what was mapped for it cannot be unmapped any more.
 */
void rackbus_ntb_gone(struct device *ntb)
{
	struct rackbus_function *fn;
	unsigned long flags;

	spin_lock_irqsave(&alive_lock, flags);
	list_for_each_entry(fn, &alive, alive)
		if (fn->dma_device == ntb)
			WRITE_ONCE(fn->dma_gone, true);
	spin_unlock_irqrestore(&alive_lock, flags);
}

/* With rackbus_lock. */
struct rackbus_function *rackbus_find(u32 handle)
{
	struct rackbus_function *fn;

	list_for_each_entry(fn, &rackbus_functions, entry)
		if (fn->handle == handle)
			return fn;
	return NULL;
}

/*
 * With rackbus_lock: its PCI device with a reference, or NULL.  Drivers may be
 * letting go of it under who removes the bus.
 */
struct pci_dev *rackbus_device(struct rackbus_function *fn)
{
	return fn->bus ? pci_get_slot(fn->bus, 0) : pci_dev_get(fn->leaving);
}

/* With rackbus_lock: begins to take it away. */
void rackbus_take_away(struct rackbus_function *fn, enum rackbus_state state)
{
	bool idle = fn->state == RACKBUS_STATE_BORROWED;

	fn->state = state;
	if (idle) {
		kref_get(&fn->ref);
		queue_work(rackbus_removals, &fn->removal);
	}
	rackbus_changed();
}

/*
 * A driver that is bound is told at once: it finds the device disconnected and
 * all ones in configuration space, and need not wait for commands to time out.
 * One that is just probing finds all ones only, and its commands time out: in
 * nvme (since Linux 6.2) those of a device that is disconnected never do, as its
 * removal is to end them, which waits for the probe.
 */
static void disconnect_locked(struct rackbus_function *fn, struct pci_dev *pdev)
{
	if (!fn->probed)
		WRITE_ONCE(pdev->error_state, pci_channel_io_perm_failure);
}

/* A driver begins or ends to probe it; its device_lock() is held. */
void rackbus_probing(struct rackbus_function *fn, struct pci_dev *pdev,
		     bool probed)
{
	mutex_lock(&rackbus_lock);
	fn->probed = probed;
	if (fn->state == RACKBUS_STATE_LOSING)
		disconnect_locked(fn, pdev);
	mutex_unlock(&rackbus_lock);
}

void rackbus_lose_locked(struct rackbus_function *fn,
			 enum rackbus_reason reason)
{
	struct pci_dev *pdev;

	if (fn->state != RACKBUS_STATE_BORROWED &&
	    fn->state != RACKBUS_STATE_RETURNING)
		return;
	fn->reason = reason;
	fn->lost_at = ktime_get();
	rackbus_silence(fn);
	pdev = rackbus_device(fn);
	if (pdev) {
		disconnect_locked(fn, pdev);
		pci_warn(pdev, "rackbus: %s is lost (reason %d)\n", fn->name,
			 reason);
		pci_dev_put(pdev);
	}
	rackbus_take_away(fn, RACKBUS_STATE_LOSING);
}

void rackbus_lose(struct rackbus_function *fn, enum rackbus_reason reason)
{
	mutex_lock(&rackbus_lock);
	rackbus_lose_locked(fn, reason);
	mutex_unlock(&rackbus_lock);
}

void rackbus_lose_all(struct rackbus_ntb *ntb, enum rackbus_reason reason)
{
	struct rackbus_function *fn;

	mutex_lock(&rackbus_lock);
	list_for_each_entry(fn, &rackbus_functions, entry)
		if (fn->ntb == ntb)
			rackbus_lose_locked(fn, reason);
	mutex_unlock(&rackbus_lock);
}

/* State and heartbeat in one access, as each goes to the other host and back. */
static void look(struct rackbus_function *fn)
{
	u64 both = readq(fn->header + offsetof(struct rackbus_window_header,
					       state));
	u32 state = lower_32_bits(both);
	u32 heartbeat = upper_32_bits(both);
	ktime_t now = ktime_get();

	atomic64_inc(&fn->heartbeats);
	if (state == RACKBUS_WINDOW_READY && heartbeat != fn->heartbeat) {
		fn->heartbeat = heartbeat;
		fn->heartbeat_at = now;
		fn->unchanged = 0;
		return;
	}
	atomic64_inc(&fn->heartbeats_missed);
	fn->unchanged++;
	if (!rackbus_ntb_link_up(fn->ntb))
		rackbus_lose(fn, RACKBUS_REASON_LINK);
	else if (both == ~0ull)
		rackbus_lose(fn, RACKBUS_REASON_UNREACHABLE);
	else if (state != RACKBUS_WINDOW_READY)
		rackbus_lose(fn, RACKBUS_REASON_REVOKED);
	else if (fn->unchanged >= LOOKS - 1 &&
		 ktime_ms_delta(now, fn->heartbeat_at) >= rackbus_silence_ms)
		rackbus_lose(fn, RACKBUS_REASON_HEARTBEAT);
}

/*
 * Whether the lender has ended all that the function reaches: where it revokes
 * one, it ends that first and the control area after it, which reads as all
 * ones then.  With the bus in place, and before the NTB is closed.  May sleep.
 */
bool rackbus_has_ended(struct rackbus_function *fn, unsigned long until)
{
	bool revoked = READ_ONCE(fn->reason) == RACKBUS_REASON_REVOKED;
	u32 state;

	for (;;) {
		state = readl(fn->header + offsetof(struct rackbus_window_header,
						    state));
		if (state == ~0u)
			return revoked;
		revoked |= state == RACKBUS_WINDOW_REVOKED;
		if (!revoked || time_after(jiffies, until))
			return false;
		usleep_range(1000, 2000);
	}
}

/* A silent lender's time is over when it is, and not at some later look. */
static void watch(struct work_struct *work)
{
	struct rackbus_function *fn =
		container_of(to_delayed_work(work), struct rackbus_function,
			     watch);
	s64 silence = rackbus_silence_ms;
	s64 left;

	if (READ_ONCE(fn->gone))
		return;
	look(fn);
	left = silence - ktime_ms_delta(ktime_get(), fn->heartbeat_at);
	queue_delayed_work(rackbus_watches, &fn->watch,
			   msecs_to_jiffies(clamp(left, 1, silence / LOOKS)));
}

/* With the NTB's device_lock(): takes it away, unless somebody else does. */
static void detach(struct rackbus_function *fn)
{
	struct pci_dev *pdev;
	struct pci_bus *bus;
	bool lost;

	mutex_lock(&rackbus_lock);
	bus = fn->bus;
	if (bus) {
		pdev = rackbus_device(fn);
		fn->leaving = pdev;
		fn->bus = NULL;
	}
	mutex_unlock(&rackbus_lock);
	if (!bus)
		return;
	/* The lender may die while drivers let go: it is watched until then. */
	rackbus_bus_remove(fn, bus);
	mutex_lock(&rackbus_lock);
	fn->leaving = NULL;
	mutex_unlock(&rackbus_lock);
	pci_dev_put(pdev);
	cancel_delayed_work_sync(&fn->watch);
	rackbus_release_request(fn, rackbus_release_time());
	rackbus_silence(fn);
	rackbus_irq_remove(fn);
	rackbus_ntb_vectors_put(fn->ntb, fn);
	rackbus_close(fn);
	mutex_lock(&rackbus_lock);
	lost = fn->state == RACKBUS_STATE_LOSING;
	fn->state = lost ? RACKBUS_STATE_LOST : RACKBUS_STATE_RETURNED;
	if (lost)
		fn->removal_ms = ktime_ms_delta(ktime_get(), fn->lost_at);
	pci_info(fn->ntb->pdev, "%s is %s\n", fn->name,
		 lost ? "away" : "returned");
	fn->ntb = NULL;
	mutex_unlock(&rackbus_lock);
	complete_all(&fn->away);
	rackbus_changed();
	rackbus_let_unload();
}

static void removal(struct work_struct *work)
{
	struct rackbus_function *fn =
		container_of(work, struct rackbus_function, removal);
	struct pci_dev *pdev;
	struct pci_dev *ntb;

	/* Or a driver may be bound below the locks after all. */
	wait_for_completion(&fn->tried);
	mutex_lock(&rackbus_lock);
	/* NULL too when the NTB's driver removes it. */
	pdev = fn->bus ? rackbus_device(fn) : NULL;
	mutex_unlock(&rackbus_lock);
	if (pdev) {
		device_release_driver(&pdev->dev);
		pci_dev_put(pdev);
	}
	ntb = pci_get_domain_bus_and_slot(fn->address.domain, fn->address.bus,
					  fn->address.devfn);
	if (ntb) {
		pci_lock_rescan_remove();
		device_lock(&ntb->dev);
		detach(fn);
		device_unlock(&ntb->dev);
		pci_unlock_rescan_remove();
		pci_dev_put(ntb);
	}
	rackbus_function_put(fn);
}

/* The first function that is behind this NTB and not away, with a reference. */
static struct rackbus_function *first_behind(struct rackbus_ntb *ntb)
{
	struct rackbus_function *fn;

	list_for_each_entry(fn, &rackbus_functions, entry)
		if (fn->ntb == ntb && fn->bus) {
			kref_get(&fn->ref);
			return fn;
		}
	return NULL;
}

/*
 * The NTB's driver is being unbound; its device_lock() is held, and perhaps
 * pci_lock_rescan_remove().  The functions go in order if their lenders live.
 */
void rackbus_detach_all(struct rackbus_ntb *ntb)
{
	struct rackbus_function *fn;

	for (;;) {
		mutex_lock(&rackbus_lock);
		fn = first_behind(ntb);
		if (fn && fn->state == RACKBUS_STATE_BORROWED) {
			fn->state = RACKBUS_STATE_RETURNING;
			fn->reason = RACKBUS_REASON_NTB;
		}
		mutex_unlock(&rackbus_lock);
		if (!fn)
			return;
		detach(fn);
		rackbus_function_put(fn);
	}
}

/* The host shuts down: the devices stay in the tree, and the lenders hear. */
void rackbus_quiesce_all(struct rackbus_ntb *ntb)
{
	unsigned long until = rackbus_release_time();
	struct rackbus_function *fn;

	mutex_lock(&rackbus_lock);
	list_for_each_entry(fn, &rackbus_functions, entry) {
		if (fn->ntb != ntb)
			continue;
		rackbus_release_request(fn, until);
		rackbus_silence(fn);
	}
	mutex_unlock(&rackbus_lock);
}

bool rackbus_any(void)
{
	bool any;

	mutex_lock(&rackbus_lock);
	any = !list_empty(&rackbus_functions);
	mutex_unlock(&rackbus_lock);
	return any;
}

/* With the NTB's device_lock(): it holds still. */
bool rackbus_any_behind(struct rackbus_ntb *ntb)
{
	struct rackbus_function *fn;
	bool any = false;

	mutex_lock(&rackbus_lock);
	list_for_each_entry(fn, &rackbus_functions, entry)
		any |= fn->ntb == ntb;
	mutex_unlock(&rackbus_lock);
	return any;
}

/* With the NTB's device_lock(): whether another one has a place of its. */
bool rackbus_overlaps(struct rackbus_function *fn)
{
	struct rackbus_function *other;
	bool overlaps = false;

	mutex_lock(&rackbus_lock);
	list_for_each_entry(other, &rackbus_functions, entry)
		overlaps |= other->ntb == fn->ntb &&
			    rackbus_offers_overlap(&other->offer, &fn->offer);
	mutex_unlock(&rackbus_lock);
	return overlaps;
}

/*
 * The module cannot be unloaded while a function is borrowed: its driver would
 * be unbound under who uses it, and what a file system has in memory only would
 * be lost.  The caller has the device file open, and so the module.  The end of
 * the module waits for the works that take functions away.
 */
static void rackbus_keep_loaded(void)
{
	__module_get(THIS_MODULE);
}

/* Once for each function that was entered. */
void rackbus_let_unload(void)
{
	module_put(THIS_MODULE);
}

/* Enters it among the others, from where on it can be lost. */
int rackbus_enter(struct rackbus_function *fn)
{
	int ret = 0;

	mutex_lock(&rackbus_lock);
	if (function_count == RACKBUS_MAX_FUNCTIONS)
		ret = -ENOSPC;
	if (!ret) {
		fn->handle = ++last_handle;
		fn->state = RACKBUS_STATE_BORROWED;
		kref_get(&fn->ref);
		list_add_tail(&fn->entry, &rackbus_functions);
		function_count++;
		rackbus_keep_loaded();
	}
	mutex_unlock(&rackbus_lock);
	return ret;
}

/* With rackbus_lock. */
void rackbus_leave(struct rackbus_function *fn)
{
	complete_all(&fn->away);
	list_del(&fn->entry);
	function_count--;
	rackbus_function_put(fn);
}

struct rackbus_function *
rackbus_function_make(const struct rackbus_borrow *borrow, struct pci_dev *ntb)
{
	struct rackbus_function *fn = kzalloc(sizeof(*fn), GFP_KERNEL);
	unsigned long flags;

	if (!fn)
		return NULL;
	kref_init(&fn->ref);
	raw_spin_lock_init(&fn->config_lock);
	mutex_init(&fn->reach_lock);
	init_completion(&fn->away);
	init_completion(&fn->tried);
	INIT_DELAYED_WORK(&fn->watch, watch);
	INIT_WORK(&fn->removal, removal);
	fn->address = borrow->ntb;
	fn->dma_device = get_device(&ntb->dev);
	memcpy(fn->name, borrow->name, sizeof(fn->name));
	spin_lock_irqsave(&alive_lock, flags);
	list_add(&fn->alive, &alive);
	spin_unlock_irqrestore(&alive_lock, flags);
	return fn;
}
