// SPDX-License-Identifier: GPL-2.0
/*
 * RACKBUS_RETURN and RACKBUS_LOST, and what is known of a function meanwhile.
 */
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/jiffies.h>
#include <linux/sched/signal.h>
#include <linux/string.h>

#include "internal.h"

#define LOOK_MS		50

/* With a reference, or NULL. */
static struct rackbus_function *get(u32 handle)
{
	struct rackbus_function *fn;

	mutex_lock(&rackbus_lock);
	fn = rackbus_find(handle);
	if (fn)
		kref_get(&fn->ref);
	mutex_unlock(&rackbus_lock);
	return fn;
}

static void begin_return(struct rackbus_function *fn)
{
	mutex_lock(&rackbus_lock);
	if (fn->state == RACKBUS_STATE_BORROWED)
		rackbus_take_away(fn, RACKBUS_STATE_RETURNING);
	mutex_unlock(&rackbus_lock);
}

/* The same, unless somebody uses it: -EBUSY.  Fills disks; see users.c. */
static int begin_unused(struct rackbus_function *fn, struct list_head *disks)
{
	int ret;

	for (;;) {
		mutex_lock(&rackbus_lock);
		ret = 0;
		if (fn->state == RACKBUS_STATE_BORROWED) {
			ret = rackbus_look_at_disks(fn, disks);
			if (!ret)
				rackbus_take_away(fn, RACKBUS_STATE_RETURNING);
		}
		mutex_unlock(&rackbus_lock);
		if (ret != -EAGAIN)
			return ret;
		ret = rackbus_claim_disks(disks);
		if (ret)
			return ret;
	}
}

/* Programs that look at a new disk close it soon. */
static int begin_when_unused(struct rackbus_function *fn,
			     struct list_head *disks, unsigned long until)
{
	int ret;

	for (;;) {
		ret = begin_unused(fn, disks);
		if (ret != -EBUSY)
			return ret;
		rackbus_release_disks(disks, true);
		if (time_after(jiffies, until))
			return -EBUSY;
		if (msleep_interruptible(LOOK_MS))
			return -EINTR;
	}
}

static void forget(struct rackbus_function *fn)
{
	mutex_lock(&rackbus_lock);
	if (rackbus_find(fn->handle) == fn)
		rackbus_leave(fn);
	mutex_unlock(&rackbus_lock);
	rackbus_changed();
}

static int wait_until_away(struct rackbus_function *fn, unsigned long until)
{
	long left = time_before(jiffies, until) ? until - jiffies : 1;

	left = wait_for_completion_interruptible_timeout(&fn->away, left);
	if (left < 0)
		return -EINTR;
	return left ? 0 : -ETIMEDOUT;
}

static int give_back(struct rackbus_function *fn, bool force,
		     unsigned long until)
{
	LIST_HEAD(disks);
	int ret = 0;

	if (force)
		begin_return(fn);
	else
		ret = begin_when_unused(fn, &disks, until);
	rackbus_release_disks(&disks, false);
	if (!ret)
		ret = wait_until_away(fn, until);
	rackbus_release_disks(&disks, true);
	if (!ret)
		forget(fn);
	return ret;
}

int rackbus_return(u32 handle, bool force, unsigned int timeout_ms)
{
	struct rackbus_function *fn = get(handle);
	int ret;

	if (!fn)
		return -ENOENT;
	ret = give_back(fn, force, jiffies + msecs_to_jiffies(timeout_ms));
	rackbus_function_put(fn);
	return ret;
}

/* The module is being unloaded: nobody can borrow any more. */
void rackbus_return_all(void)
{
	struct rackbus_function *fn;

	for (;;) {
		mutex_lock(&rackbus_lock);
		fn = list_first_entry_or_null(&rackbus_functions,
					      struct rackbus_function, entry);
		if (fn)
			kref_get(&fn->ref);
		mutex_unlock(&rackbus_lock);
		if (!fn)
			return;
		begin_return(fn);
		wait_for_completion(&fn->away);
		forget(fn);
		rackbus_function_put(fn);
	}
}

int rackbus_lost(u32 handle)
{
	struct rackbus_function *fn;

	mutex_lock(&rackbus_lock);
	fn = rackbus_find(handle);
	if (fn)
		rackbus_lose_locked(fn, RACKBUS_REASON_TOLD);
	mutex_unlock(&rackbus_lock);
	return fn ? 0 : -ENOENT;
}

/* How many there are; the first of them in handles. */
u32 rackbus_list(u32 *handles, u32 capacity)
{
	struct rackbus_function *fn;
	u32 total = 0;

	mutex_lock(&rackbus_lock);
	list_for_each_entry(fn, &rackbus_functions, entry) {
		if (total < capacity)
			handles[total] = fn->handle;
		total++;
	}
	mutex_unlock(&rackbus_lock);
	return total;
}

/* What the lender has counted, while it can be asked. */
static u32 read_refused(struct rackbus_function *fn)
{
	unsigned long flags;
	u32 refused = 0;

	raw_spin_lock_irqsave(&fn->config_lock, flags);
	if (!fn->gone)
		refused = readl(fn->ring + offsetof(struct rackbus_window_ring,
						    refused));
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
	return refused;
}

static void count(struct rackbus_function *fn, struct rackbus_status *status)
{
	unsigned int k;

	status->heartbeats = atomic64_read(&fn->heartbeats);
	status->heartbeats_missed = atomic64_read(&fn->heartbeats_missed);
	status->writes_forwarded = atomic64_read(&fn->writes_forwarded);
	status->writes_lost = atomic64_read(&fn->writes_lost);
	status->writes_refused = read_refused(fn);
	status->waits_late = atomic64_read(&fn->waits_late);
	status->resets = atomic64_read(&fn->resets);
	status->dma_refused = atomic64_read(&fn->dma_refused);
	status->interrupts_stray = atomic64_read(&fn->interrupts_stray);
	for (k = 0; k < fn->vectors; k++)
		status->interrupts[k] = atomic64_read(&fn->vector[k].count);
}

int rackbus_status(struct rackbus_status *status)
{
	struct rackbus_function *fn = get(status->handle);

	if (!fn)
		return -ENOENT;
	memset(status, 0, sizeof(*status));
	mutex_lock(&rackbus_lock);
	status->state = fn->state;
	status->reason = fn->reason;
	status->removal_ms = fn->removal_ms;
	mutex_unlock(&rackbus_lock);
	status->handle = fn->handle;
	status->domain = fn->sysdata.domain;
	status->ntb = fn->address;
	status->offset = fn->offer.area;
	status->epoch = fn->offer.epoch;
	status->dma_base = fn->offer.dma_base;
	status->dma_size = fn->offer.dma_size;
	status->vectors = fn->vectors;
	status->silent_ms = ktime_ms_delta(ktime_get(), fn->heartbeat_at);
	memcpy(status->name, fn->name, sizeof(status->name));
	count(fn, status);
	rackbus_function_put(fn);
	return 0;
}
