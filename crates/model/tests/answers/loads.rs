//! A processor's lone accesses: a flow of them and a step say the same.

use crate::lab::{flow, link, run, two_hosts};

#[test]
fn a_register_is_read_and_written_as_fast_by_a_flow_as_by_a_step() {
    let rack = two_hosts(false) + &link("near", "near/gpu0", 4, 16);
    for (kind, step) in [("read", "load"), ("write", "store")] {
        for (from, to) in [("near", "near/gpu0"), ("far", "near/gpu0"), ("far", "far-ntb")] {
            let ends = format!("from = \"{from}\"\nto = \"{to}\"\n");
            let alone = format!("[flows.it]\nkind = \"{kind}\"\nsize = \"4 B\"\nspan = 64\n{ends}");
            let ends = ends.replace('\n', ", ");
            let steps = format!(
                "[flows.it]\nkind = \"steps\"\nsize = \"4 B\"\nspan = 64\nsteps = [{{ {step} = \"4 B\", {} }}]\n",
                ends.trim_end_matches(", ")
            );
            let took = [alone, steps].map(|text| flow(&run(&rack, &text), "it").latency_ns.mean);
            assert!((took[0] - took[1]).abs() < 0.1, "{kind} from {from} to {to}: {took:?}");
        }
    }
}
