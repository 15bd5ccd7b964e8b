// SPDX-License-Identifier: GPL-2.0
/*
 * rackbus: PCI functions of other hosts, borrowed through an NTB, in this
 * host's own PCI tree.
 */
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/suspend.h>

#include "internal.h"

/* What functions there are, and their states; see internal.h. */
DEFINE_MUTEX(rackbus_lock);

/*
 * Losses are noticed on the first one, which never waits for memory: memory may
 * wait for I/O that fails only when the loss is noticed.  Functions are taken
 * away on the other one, as drivers wait for works of queues of any kind.
 */
struct workqueue_struct *rackbus_watches;
struct workqueue_struct *rackbus_removals;

#define MIN_SILENCE_MS	100
#define MAX_SILENCE_MS	60000

unsigned int rackbus_silence_ms = 500;

static int set_silence(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, MIN_SILENCE_MS,
				     MAX_SILENCE_MS);
}

static const struct kernel_param_ops silence_ops = {
	.set = set_silence,
	.get = param_get_uint,
};

module_param_cb(silence_ms, &silence_ops, &rackbus_silence_ms, 0644);
MODULE_PARM_DESC(silence_ms,
		 "milliseconds without a heartbeat after which a lender is dead (default 500)");

/* A lender's device knows nothing of this host asleep: it would go on. */
static int suspend_notify(struct notifier_block *block, unsigned long action,
			  void *data)
{
	switch (action) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		if (!rackbus_any())
			break;
		pr_err("rackbus: no suspend while functions are borrowed: return them first\n");
		return notifier_from_errno(-EBUSY);
	}
	return NOTIFY_DONE;
}

static struct notifier_block suspend_notifier = {
	.notifier_call = suspend_notify,
};

static int make_workqueues(void)
{
	rackbus_watches = alloc_workqueue("rackbus", WQ_UNBOUND | WQ_HIGHPRI |
					  WQ_MEM_RECLAIM, 0);
	if (!rackbus_watches)
		return -ENOMEM;
	rackbus_removals = alloc_workqueue("rackbus-removal", WQ_UNBOUND |
					   WQ_HIGHPRI, 0);
	if (!rackbus_removals) {
		destroy_workqueue(rackbus_watches);
		return -ENOMEM;
	}
	return 0;
}

/* A watch may begin a removal, until all are over. */
static void destroy_workqueues(void)
{
	destroy_workqueue(rackbus_watches);
	destroy_workqueue(rackbus_removals);
}

static int __init rackbus_init(void)
{
	int ret;

	ret = make_workqueues();
	if (ret)
		return ret;
	ret = rackbus_iommu_register();
	if (ret)
		goto destroy_workqueues;
	ret = bus_register_notifier(&pci_bus_type, &rackbus_bus_notifier);
	if (ret)
		goto unregister_iommu;
	ret = register_pm_notifier(&suspend_notifier);
	if (ret)
		goto unregister_bus;
	ret = pci_register_driver(&rackbus_ntb_driver);
	if (ret)
		goto unregister_pm;
	ret = rackbus_device_register();
	if (ret)
		goto unregister_driver;
	return 0;

unregister_driver:
	pci_unregister_driver(&rackbus_ntb_driver);
unregister_pm:
	unregister_pm_notifier(&suspend_notifier);
unregister_bus:
	bus_unregister_notifier(&pci_bus_type, &rackbus_bus_notifier);
unregister_iommu:
	rackbus_iommu_unregister();
destroy_workqueues:
	destroy_workqueues();
	return ret;
}

/* No descriptor is open, and nothing borrowed unless it was forced (rmmod -f). */
static void __exit rackbus_exit(void)
{
	rackbus_device_unregister();
	rackbus_return_all();
	pci_unregister_driver(&rackbus_ntb_driver);
	unregister_pm_notifier(&suspend_notifier);
	destroy_workqueues();
	rackbus_wait_for_bridges();
	/* Who was waited for has to hear when an NTB is removed. */
	bus_unregister_notifier(&pci_bus_type, &rackbus_bus_notifier);
	rackbus_iommu_unregister();
}

module_init(rackbus_init);
module_exit(rackbus_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("PCI functions of other hosts, borrowed through an NTB");
