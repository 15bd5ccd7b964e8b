// SPDX-License-Identifier: GPL-2.0
/*
 * DMA of a borrowed function.  What its device writes arrives in this host as
 * an access of the NTB, so memory is mapped for the NTB; the device finds it at
 * the same address plus the base of the lender's window.
 *
 * These are operations of the device, and not its dma_range_map: that is freed
 * when a driver is unbound, and the next one would give the device addresses
 * that mean the lender's own memory.
 *
 * A driver may free memory when its device is long away (nvme does, when the
 * last file on a lost disk is closed), and even the NTB.
 */
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/scatterlist.h>

#include "compat.h"
#include "internal.h"

static struct device *inner(struct device *dev)
{
	return rackbus_function_of(dev)->dma_device;
}

/*
 * With the NTB itself gone from this host, so is what an IOMMU knew of it, and
 * the kernel would look for that.  What is freed now stays as it is: it is not
 * much, and an NTB is seldom removed.
 */
static bool is_left(struct device *dev)
{
	if (likely(!READ_ONCE(rackbus_function_of(dev)->dma_gone)))
		return false;
	pr_warn_once("rackbus: memory of a borrowed device is freed after its NTB was removed, and stays behind\n");
	return true;
}

/* Whether this host's own IOMMU translates what arrives through the NTB. */
bool rackbus_dma_is_translated(struct device *ntb)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(ntb);

	return domain && domain->type != IOMMU_DOMAIN_IDENTITY;
}

static dma_addr_t inward(struct device *dev, dma_addr_t address)
{
	return address - rackbus_function_of(dev)->offer.dma_base;
}

/* The address as the device has it; DMA_MAPPING_ERROR when it has none. */
static dma_addr_t outward(struct device *dev, dma_addr_t address, size_t size,
			  u64 mask)
{
	struct rackbus_function *fn = rackbus_function_of(dev);
	u64 last = fn->offer.dma_base + address + size - 1;

	if (size && rackbus_inside(address, size, fn->offer.dma_size) &&
	    last <= mask)
		return fn->offer.dma_base + address;
	atomic64_inc(&fn->dma_refused);
	dev_err_ratelimited(dev, "rackbus: DMA address %pad (%zu bytes) is outside of the window\n",
			    &address, size);
	return DMA_MAPPING_ERROR;
}

static void *rackbus_alloc(struct device *dev, size_t size, dma_addr_t *handle,
			   gfp_t gfp, unsigned long attrs)
{
	void *memory = dma_alloc_attrs(inner(dev), size, handle, gfp, attrs);
	dma_addr_t address;

	if (!memory)
		return NULL;
	address = outward(dev, *handle, size, dev->coherent_dma_mask);
	if (address == DMA_MAPPING_ERROR) {
		dma_free_attrs(inner(dev), size, memory, *handle, attrs);
		return NULL;
	}
	*handle = address;
	return memory;
}

static void rackbus_free(struct device *dev, size_t size, void *memory,
			 dma_addr_t handle, unsigned long attrs)
{
	if (is_left(dev))
		return;
	dma_free_attrs(inner(dev), size, memory, inward(dev, handle), attrs);
}

static struct page *rackbus_alloc_pages(struct device *dev, size_t size,
					dma_addr_t *handle,
					enum dma_data_direction dir, gfp_t gfp)
{
	struct page *page = dma_alloc_pages(inner(dev), size, handle, dir, gfp);
	dma_addr_t address;

	if (!page)
		return NULL;
	address = outward(dev, *handle, size, dev->coherent_dma_mask);
	if (address == DMA_MAPPING_ERROR) {
		dma_free_pages(inner(dev), size, page, *handle, dir);
		return NULL;
	}
	*handle = address;
	return page;
}

static void rackbus_free_pages(struct device *dev, size_t size,
			       struct page *page, dma_addr_t handle,
			       enum dma_data_direction dir)
{
	if (is_left(dev))
		return;
	dma_free_pages(inner(dev), size, page, inward(dev, handle), dir);
}

static int rackbus_mmap(struct device *dev, struct vm_area_struct *vma,
			void *memory, dma_addr_t handle, size_t size,
			unsigned long attrs)
{
	return dma_mmap_attrs(inner(dev), vma, memory, inward(dev, handle),
			      size, attrs);
}

static int rackbus_get_sgtable(struct device *dev, struct sg_table *table,
			       void *memory, dma_addr_t handle, size_t size,
			       unsigned long attrs)
{
	return dma_get_sgtable_attrs(inner(dev), table, memory,
				     inward(dev, handle), size, attrs);
}

#if RACKBUS_MAP_PHYS
static dma_addr_t rackbus_map(struct device *dev, phys_addr_t phys, size_t size,
			      enum dma_data_direction dir, unsigned long attrs)
{
	dma_addr_t mapped, address;

	/* Registers of other devices are not behind the window. */
	if (attrs & DMA_ATTR_MMIO) {
		atomic64_inc(&rackbus_function_of(dev)->dma_refused);
		return DMA_MAPPING_ERROR;
	}
	mapped = dma_map_phys(inner(dev), phys, size, dir, attrs);
	if (dma_mapping_error(inner(dev), mapped))
		return DMA_MAPPING_ERROR;
	address = outward(dev, mapped, size, *dev->dma_mask);
	if (address == DMA_MAPPING_ERROR)
		dma_unmap_phys(inner(dev), mapped, size, dir, attrs);
	return address;
}

static void rackbus_unmap(struct device *dev, dma_addr_t handle, size_t size,
			  enum dma_data_direction dir, unsigned long attrs)
{
	if (is_left(dev))
		return;
	dma_unmap_phys(inner(dev), inward(dev, handle), size, dir, attrs);
}
#else
static dma_addr_t rackbus_map(struct device *dev, struct page *page,
			      unsigned long offset, size_t size,
			      enum dma_data_direction dir, unsigned long attrs)
{
	dma_addr_t mapped, address;

	mapped = dma_map_page_attrs(inner(dev), page, offset, size, dir, attrs);
	if (dma_mapping_error(inner(dev), mapped))
		return DMA_MAPPING_ERROR;
	address = outward(dev, mapped, size, *dev->dma_mask);
	if (address == DMA_MAPPING_ERROR)
		dma_unmap_page_attrs(inner(dev), mapped, size, dir, attrs);
	return address;
}

static void rackbus_unmap(struct device *dev, dma_addr_t handle, size_t size,
			  enum dma_data_direction dir, unsigned long attrs)
{
	if (is_left(dev))
		return;
	dma_unmap_page_attrs(inner(dev), inward(dev, handle), size, dir, attrs);
}
#endif

/* The first entries' addresses are the device's: makes them the NTB's again. */
static void sg_inward(struct device *dev, struct scatterlist *sg, int entries)
{
	struct scatterlist *s;
	int i;

	for_each_sg(sg, s, entries, i) {
		if (!sg_dma_len(s))
			break;
		sg_dma_address(s) = inward(dev, sg_dma_address(s));
	}
}

static int rackbus_map_sg(struct device *dev, struct scatterlist *sg,
			  int entries, enum dma_data_direction dir,
			  unsigned long attrs)
{
	int mapped = dma_map_sg_attrs(inner(dev), sg, entries, dir, attrs);
	struct scatterlist *s;
	dma_addr_t address;
	int i;

	if (mapped <= 0)
		return -EIO;
	for_each_sg(sg, s, mapped, i) {
		address = outward(dev, sg_dma_address(s), sg_dma_len(s),
				  *dev->dma_mask);
		if (address == DMA_MAPPING_ERROR) {
			sg_inward(dev, sg, i);
			dma_unmap_sg_attrs(inner(dev), sg, entries, dir, attrs);
			return -EIO;
		}
		sg_dma_address(s) = address;
	}
	return mapped;
}

static void rackbus_unmap_sg(struct device *dev, struct scatterlist *sg,
			     int entries, enum dma_data_direction dir,
			     unsigned long attrs)
{
	if (is_left(dev))
		return;
	sg_inward(dev, sg, entries);
	dma_unmap_sg_attrs(inner(dev), sg, entries, dir, attrs);
}

static void rackbus_sync_for_cpu(struct device *dev, dma_addr_t handle,
				 size_t size, enum dma_data_direction dir)
{
	dma_sync_single_for_cpu(inner(dev), inward(dev, handle), size, dir);
}

static void rackbus_sync_for_device(struct device *dev, dma_addr_t handle,
				    size_t size, enum dma_data_direction dir)
{
	dma_sync_single_for_device(inner(dev), inward(dev, handle), size, dir);
}

static void rackbus_sync_sg_for_cpu(struct device *dev, struct scatterlist *sg,
				    int entries, enum dma_data_direction dir)
{
	struct scatterlist *s;
	int i;

	for_each_sg(sg, s, entries, i) {
		if (!sg_dma_len(s))
			break;
		rackbus_sync_for_cpu(dev, sg_dma_address(s), sg_dma_len(s),
				     dir);
	}
}

static void rackbus_sync_sg_for_device(struct device *dev,
				       struct scatterlist *sg, int entries,
				       enum dma_data_direction dir)
{
	struct scatterlist *s;
	int i;

	for_each_sg(sg, s, entries, i) {
		if (!sg_dma_len(s))
			break;
		rackbus_sync_for_device(dev, sg_dma_address(s), sg_dma_len(s),
					dir);
	}
}

static u64 last_address(struct device *dev)
{
	struct rackbus_offer *offer = &rackbus_function_of(dev)->offer;

	return offer->dma_base + offer->dma_size - 1;
}

static int rackbus_dma_supported(struct device *dev, u64 mask)
{
	return mask >= last_address(dev);
}

static u64 rackbus_get_required_mask(struct device *dev)
{
	return DMA_BIT_MASK(fls64(last_address(dev)));
}

static size_t rackbus_max_mapping_size(struct device *dev)
{
	return min_t(u64, dma_max_mapping_size(inner(dev)),
		     rackbus_function_of(dev)->offer.dma_size);
}

static unsigned long rackbus_get_merge_boundary(struct device *dev)
{
	return dma_get_merge_boundary(inner(dev));
}

const struct dma_map_ops rackbus_dma_ops = {
	.alloc = rackbus_alloc,
	.free = rackbus_free,
	.RACKBUS_ALLOC_PAGES = rackbus_alloc_pages,
	.free_pages = rackbus_free_pages,
	.mmap = rackbus_mmap,
	.get_sgtable = rackbus_get_sgtable,
#if RACKBUS_MAP_PHYS
	.map_phys = rackbus_map,
	.unmap_phys = rackbus_unmap,
#else
	.map_page = rackbus_map,
	.unmap_page = rackbus_unmap,
#endif
	.map_sg = rackbus_map_sg,
	.unmap_sg = rackbus_unmap_sg,
	.sync_single_for_cpu = rackbus_sync_for_cpu,
	.sync_single_for_device = rackbus_sync_for_device,
	.sync_sg_for_cpu = rackbus_sync_sg_for_cpu,
	.sync_sg_for_device = rackbus_sync_sg_for_device,
	.dma_supported = rackbus_dma_supported,
	.get_required_mask = rackbus_get_required_mask,
	.max_mapping_size = rackbus_max_mapping_size,
	.get_merge_boundary = rackbus_get_merge_boundary,
};
