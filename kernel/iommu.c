// SPDX-License-Identifier: GPL-2.0
/*
 * The IOMMU of borrowed functions, for this host's vfio-pci: a group for each
 * of them.  It is the lender's, which maps what it is told to map and nothing
 * else.
 *
 * What is mapped are addresses of memory, which are the NTB's only where this
 * host's own IOMMU does not translate for it: elsewhere a function has no group.
 *
 * A function begins in the identity domain, in which it reaches all that the
 * lender's window covers, and dma.c says the addresses.  In any other domain it
 * is isolated: it reaches what is mapped there.  The lender resets it whenever
 * it is isolated or is not any more, so that nothing which one user has begun
 * goes on for the next one.
 *
 * What is mapped is told to the lender and waited for, as whoever maps may
 * rely on it, and whoever unmaps gives the memory to others.  A lender that
 * does not say that a mapping has ended loses all functions of its NTB, which
 * is closed before the memory is somebody else's.
 */
#include "compat.h"
#include "internal.h"

#if RACKBUS_IOMMU
#include <linux/iommu.h>
#include <linux/ioport.h>
#include <linux/irqdomain.h>
#include <linux/lockdep.h>
#include <linux/maple_tree.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

/* One mapping, which ends as a whole: none is ever split. */
struct rackbus_mapping {
	u64 iova;
	u64 address;
	u64 size;
	u32 access;
};

struct rackbus_domain {
	struct iommu_domain core;
	struct rackbus_function *fn;	/* with a reference */
	bool attached;			/* fn->reach_lock */
	bool was_attached;		/* fn->reach_lock */
	struct maple_tree mappings;	/* by all addresses of each */
};

static struct iommu_device rackbus_iommu;
static const struct iommu_ops rackbus_iommu_ops;
static const struct iommu_domain_ops rackbus_domain_ops;

static struct rackbus_domain *to_rackbus_domain(struct iommu_domain *domain)
{
	return container_of(domain, struct rackbus_domain, core);
}

/*
 * With reach_lock, as are all below that do not take it.  The lender did not
 * say that a mapping has ended: it ends here, with all that arrives from there,
 * unless the lender has taken the function away in order.  On return nothing of
 * the function's reaches this host.
 */
static void end_reach(struct rackbus_function *fn)
{
	if (fn->unreached)
		return;
	if (rackbus_has_ended(fn, rackbus_answer_time())) {
		rackbus_lose(fn, RACKBUS_REASON_REVOKED);
	} else {
		rackbus_lose(fn, RACKBUS_REASON_SILENT);
		rackbus_ntb_close(fn->ntb);
	}
	fn->unreached = true;
}

/* Whether a request may have been carried out although it failed. */
static bool is_open(int ret)
{
	return ret == -ETIMEDOUT || ret == -ENODEV || ret == -EPROTO;
}

/* What the lender does not do is not mapped on return. */
static int tell(struct rackbus_function *fn,
		const struct rackbus_mapping *mapping, bool on)
{
	const struct rackbus_window_mapping what = {
		.iova = cpu_to_le64(mapping->iova),
		.address = cpu_to_le64(mapping->address),
		.size = cpu_to_le64(mapping->size),
		.access = cpu_to_le32(mapping->access),
		.result = cpu_to_le32(~0u),
	};
	int ret = rackbus_ask(fn, RACKBUS_REQUEST_MAP, on, &what);

	if (ret && (!on || is_open(ret)))
		end_reach(fn);
	return ret;
}

/*
 * Who is killed does not wait for all that it has mapped.  What the lender was
 * asked for is waited for all the same: it may be mapped after that.
 */
static int make(struct rackbus_function *fn,
		const struct rackbus_mapping *mapping)
{
	return fatal_signal_pending(current) ? -EINTR : tell(fn, mapping, true);
}

static int isolate(struct rackbus_function *fn, bool on)
{
	const struct rackbus_window_mapping none = {
		.result = cpu_to_le32(~0u),
	};
	int ret;

	if (fn->isolated == on)
		return 0;
	ret = rackbus_ask(fn, RACKBUS_REQUEST_ISOLATE, on, &none);
	if (!ret || !on)
		WRITE_ONCE(fn->isolated, on);
	/* Its next driver would have it reach what is not there. */
	if (ret && (!on || is_open(ret)))
		rackbus_lose(fn, RACKBUS_REASON_SILENT);
	return ret;
}

/* Of all mappings, or of those before last. */
static void end_mappings(struct rackbus_domain *domain,
			 const struct rackbus_mapping *last)
{
	struct rackbus_mapping *mapping;
	unsigned long at = 0;

	mt_for_each(&domain->mappings, mapping, at, ULONG_MAX) {
		if (mapping == last)
			break;
		tell(domain->fn, mapping, false);
	}
}

static int make_mappings(struct rackbus_domain *domain)
{
	struct rackbus_mapping *mapping;
	unsigned long at = 0;
	int ret;

	mt_for_each(&domain->mappings, mapping, at, ULONG_MAX) {
		ret = make(domain->fn, mapping);
		if (ret) {
			end_mappings(domain, mapping);
			return ret;
		}
	}
	return 0;
}

static void leave(struct rackbus_function *fn)
{
	if (!fn->domain)
		return;
	fn->domain->attached = false;
	fn->domain = NULL;
}

/* Into another domain of the lender's IOMMU, in which nothing is mapped yet. */
static int move(struct rackbus_function *fn)
{
	if (fn->domain)
		end_mappings(fn->domain, NULL);
	leave(fn);
	return isolate(fn, true);
}

/*
 * To leave what it has reached cannot fail: the lender ends all of it with the
 * isolation, or it ends here.
 */
static RACKBUS_ATTACH(rackbus_attach_identity)
{
	struct rackbus_function *fn = rackbus_function_of(dev);
	bool mapped;

	mutex_lock(&fn->reach_lock);
	mapped = fn->domain && !mtree_empty(&fn->domain->mappings);
	leave(fn);
	if (isolate(fn, false) && mapped)
		end_reach(fn);
	mutex_unlock(&fn->reach_lock);
	return 0;
}

static RACKBUS_ATTACH(rackbus_attach_blocked)
{
	struct rackbus_function *fn = rackbus_function_of(dev);
	int ret;

	mutex_lock(&fn->reach_lock);
	ret = move(fn);
	mutex_unlock(&fn->reach_lock);
	return ret;
}

/* Of two functions, each has a domain of its own: VFIO makes them so then. */
static RACKBUS_ATTACH(rackbus_attach)
{
	struct rackbus_domain *wanted = to_rackbus_domain(domain);
	struct rackbus_function *fn = rackbus_function_of(dev);
	int ret;

	if (wanted->fn != fn)
		return -EINVAL;
	mutex_lock(&fn->reach_lock);
	ret = rackbus_dma_is_translated(fn->dma_device) ? -EPERM : move(fn);
	if (!ret)
		ret = make_mappings(wanted);
	/* The kernel goes back to it after a failure, and that cannot fail. */
	if (ret && wanted->was_attached) {
		rackbus_lose(fn, RACKBUS_REASON_SILENT);
		ret = 0;
	}
	if (!ret) {
		fn->domain = wanted;
		wanted->attached = true;
		wanted->was_attached = true;
	}
	mutex_unlock(&fn->reach_lock);
	return ret;
}

static int enter(struct rackbus_domain *domain, struct rackbus_mapping *mapping,
		 gfp_t gfp)
{
	int ret;

	ret = mtree_insert_range(&domain->mappings, mapping->iova,
				 mapping->iova + mapping->size - 1, mapping,
				 gfp);
	if (ret || !domain->attached)
		return ret;
	ret = make(domain->fn, mapping);
	if (ret)
		mtree_erase(&domain->mappings, mapping->iova);
	return ret;
}

/* Registers of other devices are not for it, whoever has them mapped. */
static bool is_memory(phys_addr_t address, size_t size)
{
	return pfn_valid(PHYS_PFN(address)) &&
	       pfn_valid(PHYS_PFN(address + size - 1)) &&
	       region_intersects(address, size, IORESOURCE_SYSTEM_RAM,
				 IORES_DESC_NONE) == REGION_INTERSECTS;
}

/* Sleeps, as VFIO lets it; nobody else maps here. */
static int rackbus_map_pages(struct iommu_domain *domain, unsigned long iova,
			     phys_addr_t paddr, size_t pgsize, size_t pgcount,
			     int prot, gfp_t gfp, size_t *mapped)
{
	struct rackbus_domain *in = to_rackbus_domain(domain);
	struct rackbus_function *fn = in->fn;
	size_t size = pgsize * pgcount;
	struct rackbus_mapping *mapping;
	int ret;

	if (!gfpflags_allow_blocking(gfp))
		return -EINVAL;
	if (prot & IOMMU_MMIO ||
	    !rackbus_inside(paddr, size, fn->offer.dma_size) ||
	    !is_memory(paddr, size)) {
		atomic64_inc(&fn->dma_refused);
		return -ERANGE;
	}
	mapping = kmalloc(sizeof(*mapping), gfp);
	if (!mapping)
		return -ENOMEM;
	*mapping = (struct rackbus_mapping) {
		.iova = iova,
		.address = paddr,
		.size = size,
		.access = (prot & IOMMU_READ ? RACKBUS_MAP_READ : 0) |
			  (prot & IOMMU_WRITE ? RACKBUS_MAP_WRITE : 0),
	};
	mutex_lock(&fn->reach_lock);
	ret = enter(in, mapping, gfp);
	mutex_unlock(&fn->reach_lock);
	if (ret)
		kfree(mapping);
	else
		*mapped = size;
	return ret;
}

static size_t rackbus_unmap_pages(struct iommu_domain *domain,
				  unsigned long iova, size_t pgsize,
				  size_t pgcount,
				  struct iommu_iotlb_gather *gather)
{
	struct rackbus_domain *in = to_rackbus_domain(domain);
	size_t size = pgsize * pgcount;
	struct rackbus_mapping *mapping;
	size_t unmapped = 0;

	mutex_lock(&in->fn->reach_lock);
	while (unmapped < size) {
		mapping = mtree_load(&in->mappings, iova + unmapped);
		if (!mapping || mapping->iova != iova + unmapped)
			break;
		if (in->attached)
			tell(in->fn, mapping, false);
		mtree_erase(&in->mappings, mapping->iova);
		unmapped += mapping->size;
		kfree(mapping);
	}
	mutex_unlock(&in->fn->reach_lock);
	return unmapped;
}

static phys_addr_t rackbus_iova_to_phys(struct iommu_domain *domain,
					dma_addr_t iova)
{
	struct rackbus_domain *in = to_rackbus_domain(domain);
	struct rackbus_mapping *mapping;
	phys_addr_t found = 0;

	mutex_lock(&in->fn->reach_lock);
	mapping = mtree_load(&in->mappings, iova);
	if (mapping)
		found = mapping->address + (iova - mapping->iova);
	mutex_unlock(&in->fn->reach_lock);
	return found;
}

static void rackbus_domain_free(struct iommu_domain *domain)
{
	struct rackbus_domain *gone = to_rackbus_domain(domain);
	struct rackbus_mapping *mapping;
	unsigned long at = 0;

	mt_for_each(&gone->mappings, mapping, at, ULONG_MAX)
		kfree(mapping);
	mtree_destroy(&gone->mappings);
	rackbus_function_put(gone->fn);
	kfree(gone);
	module_put(THIS_MODULE);
}

static const struct iommu_domain_ops rackbus_domain_ops = {
	.attach_dev = rackbus_attach,
	.map_pages = rackbus_map_pages,
	.unmap_pages = rackbus_unmap_pages,
	.iova_to_phys = rackbus_iova_to_phys,
	.free = rackbus_domain_free,
};

static struct iommu_domain rackbus_identity = {
	.type = IOMMU_DOMAIN_IDENTITY,
	.ops = &(const struct iommu_domain_ops) {
		.attach_dev = rackbus_attach_identity,
	},
};

static struct iommu_domain rackbus_blocked = {
	.type = IOMMU_DOMAIN_BLOCKED,
	.ops = &(const struct iommu_domain_ops) {
		.attach_dev = rackbus_attach_blocked,
	},
};

/*
 * One size of pages, of which a request maps as many as are together.  How many
 * bits the lender's IOMMU has is not known here: it refuses what it has not.
 */
static struct iommu_domain *rackbus_domain_alloc(struct device *dev)
{
	struct rackbus_domain *domain = kzalloc(sizeof(*domain), GFP_KERNEL);

	if (!domain)
		return NULL;
	/* It may outlive its function, in a container that is kept open. */
	__module_get(THIS_MODULE);
	domain->fn = rackbus_function_of(dev);
	kref_get(&domain->fn->ref);
	mt_init(&domain->mappings);
	domain->core.ops = &rackbus_domain_ops;
	domain->core.pgsize_bitmap = RACKBUS_PAGE;
	domain->core.geometry.aperture_end = ~0ull;
	domain->core.geometry.force_aperture = true;
	return &domain->core;
}

static bool rackbus_capable(struct device *dev, enum iommu_cap cap)
{
	return cap == IOMMU_CAP_CACHE_COHERENCY;
}

static struct iommu_device *rackbus_probe_device(struct device *dev)
{
	return rackbus_is_function(dev) ? &rackbus_iommu : ERR_PTR(-ENODEV);
}

/* Only ever in the identity domain for this host's own drivers. */
static int rackbus_def_domain_type(struct device *dev)
{
	return IOMMU_DOMAIN_IDENTITY;
}

static void reserve(struct list_head *regions, u64 start,
		    enum iommu_resv_type type)
{
	struct iommu_resv_region *region;

	region = iommu_alloc_resv_region(start, RACKBUS_MSI_SIZE, 0, type,
					 GFP_KERNEL);
	if (region)
		list_add_tail(&region->list, regions);
}

/* Where it reaches interrupts: the lender's own, and this host's. */
static void rackbus_get_resv_regions(struct device *dev,
				     struct list_head *regions)
{
	reserve(regions, RACKBUS_MSI_ADDRESS, IOMMU_RESV_MSI);
	reserve(regions, rackbus_function_of(dev)->offer.mapped_msi_base,
		IOMMU_RESV_RESERVED);
}

static const struct iommu_ops rackbus_iommu_ops = {
	.owner = THIS_MODULE,
	.capable = rackbus_capable,
	.domain_alloc_paging = rackbus_domain_alloc,
	.probe_device = rackbus_probe_device,
	.device_group = generic_device_group,
	.get_resv_regions = rackbus_get_resv_regions,
	.def_domain_type = rackbus_def_domain_type,
	.default_domain_ops = &rackbus_domain_ops,
	.identity_domain = &rackbus_identity,
	.blocked_domain = &rackbus_blocked,
	.release_domain = &rackbus_identity,
};

/*
 * Before the kernel looks for a device's IOMMU: it is this one, and not the one
 * that this host may have for its own devices.
 */
static int rackbus_iommu_notify(struct notifier_block *block,
				unsigned long action, void *data)
{
	struct device *dev = data;
	int ret;

	if (action != BUS_NOTIFY_ADD_DEVICE || !rackbus_is_function(dev) ||
	    !rackbus_function_of(dev)->offer.mappings)
		return NOTIFY_DONE;
	if (rackbus_dma_is_translated(rackbus_function_of(dev)->dma_device)) {
		dev_info(dev, "rackbus: in no IOMMU group, and not for vfio-pci: this host's IOMMU translates for the NTB (boot with iommu=pt)\n");
		return NOTIFY_DONE;
	}
	/*
	 * The kernel does not let modules take the lock that lockdep looks for
	 * here.  It is against who looks for the IOMMU of the same device at
	 * the same time, which only an IOMMU does that registers just now.
	 */
	lockdep_off();
	ret = iommu_fwspec_init(dev, rackbus_iommu.fwnode);
	lockdep_on();
	if (ret)
		dev_warn(dev, "rackbus: in no IOMMU group (%d)\n", ret);
	return NOTIFY_OK;
}

static struct notifier_block iommu_notifier = {
	.notifier_call = rackbus_iommu_notify,
	.priority = 1,		/* the kernel's own has 0 */
};

int rackbus_iommu_register(void)
{
	int ret;

	rackbus_iommu.fwnode = irq_domain_alloc_named_fwnode("rackbus-iommu");
	if (!rackbus_iommu.fwnode)
		return -ENOMEM;
	ret = iommu_device_sysfs_add(&rackbus_iommu, NULL, NULL, "rackbus");
	if (ret)
		goto free_fwnode;
	ret = iommu_device_register(&rackbus_iommu, &rackbus_iommu_ops, NULL);
	if (ret)
		goto remove_sysfs;
	ret = bus_register_notifier(&pci_bus_type, &iommu_notifier);
	if (ret)
		goto unregister;
	return 0;

unregister:
	iommu_device_unregister(&rackbus_iommu);
remove_sysfs:
	iommu_device_sysfs_remove(&rackbus_iommu);
free_fwnode:
	irq_domain_free_fwnode(rackbus_iommu.fwnode);
	return ret;
}

/* No function is left. */
void rackbus_iommu_unregister(void)
{
	bus_unregister_notifier(&pci_bus_type, &iommu_notifier);
	iommu_device_unregister(&rackbus_iommu);
	iommu_device_sysfs_remove(&rackbus_iommu);
	irq_domain_free_fwnode(rackbus_iommu.fwnode);
}

#else /* !RACKBUS_IOMMU */

int rackbus_iommu_register(void)
{
	pr_info("rackbus: vfio-pci takes no borrowed function on this kernel, which has one IOMMU driver for all devices (it takes Linux 6.12)\n");
	return 0;
}

void rackbus_iommu_unregister(void)
{
}

#endif
