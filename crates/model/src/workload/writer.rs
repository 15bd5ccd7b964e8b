//! Writes a flow's script: the engine's steps that its kind stands for.

use std::collections::BTreeMap;

use rackbus_fabric::text::Problem;

use super::scripts::{Failed, Run};
use super::steps::{Move, MoveKind, StepSpec};
use super::{FlowKind, FlowSpec, QueuesIn};
use crate::assembly::{AssemblyError, End, Source};
use crate::engine::{
    Addresses, Admitted, ResourceId, RouteId, Script, ScriptId, Step, TracedJob, Until,
};
use crate::flow::cost;
use crate::random::Distribution;
use crate::time::Time;

/// Bytes of a doorbell or interrupt, and of a completion queue's entry.
const SIGNAL: u64 = 4;
const COMPLETION: u64 = 16;

/// An end that does not fit the rack, with its place in the workload.
pub(super) fn misfit(spec: &FlowSpec, nth: usize, error: &AssemblyError) -> Failed {
    let span = spec.places.ends.get(nth).cloned().unwrap_or(0..0);
    let text = error.to_string();
    let (what, allowed) = text.split_once("; ").unwrap_or((&text, "see the rack file"));
    Failed::Wrong(Problem { span, what: what.to_owned(), allowed: allowed.to_owned() })
}

/// Writes the script of one queue of a flow.
pub(super) struct Writer<'a> {
    pub(super) run: &'a mut Run,
    /// Streams of the queue, by end, whether they lead to CXL memory, and channel.
    pub(super) sources: BTreeMap<(End, bool, String), Source>,
    pub(super) spec: &'a FlowSpec,
    pub(super) ends: &'a [End],
    pub(super) script: Script,
    pub(super) routes: Vec<RouteId>,
    /// The device that takes up the jobs, where it shapes.
    pub(super) shaping: Option<End>,
    /// The number of the flow's queue among all.
    pub(super) queue: u16,
}

impl Writer<'_> {
    /// The source of requests at an end.
    fn source(&mut self, nth: usize) -> Result<Source, Failed> {
        self.run.assembly.source(self.ends[nth]).map_err(|e| misfit(self.spec, nth, &e))
    }

    /// The source of requests at an end, for what goes to another.
    fn source_towards(&mut self, nth: usize, to: usize) -> Result<Source, Failed> {
        let source = self.run.assembly.source_towards(self.ends[nth], self.ends[to]);
        source.map_err(|e| misfit(self.spec, nth, &e))
    }

    fn route(&mut self, from: usize, to: usize) -> Result<RouteId, Failed> {
        let source = self.ends[from];
        let route = self.run.assembly.route(source, self.ends[to]);
        let route = route.map_err(|error| misfit(self.spec, to, &error))?;
        if self.run.assembly.is_own_memory(source, route) {
            let own = AssemblyError::OwnMemory(self.run.assembly.end_name(source));
            return Err(misfit(self.spec, to, &own));
        }
        self.routes.push(route);
        Ok(route)
    }

    /// Bytes that an end writes to another.
    fn write(&mut self, source: Source, route: RouteId, bytes: u64, until: Until) {
        self.script.push(Step::Write { stream: source.stream, route, address: 0, bytes, until });
    }

    /// What an end reads and writes by its DMA counts against the limits that the rack file has for it.
    fn spend(&mut self, nth: usize, moved: [u64; 2]) {
        self.script.extend(self.run.metered(self.ends[nth], moved));
    }

    fn read(&mut self, source: Source, route: RouteId, bytes: u64) {
        self.script.push(Step::Read { stream: source.stream, route, address: 0, bytes });
    }

    /// What an end takes before its request leaves: a processor's issue.
    fn issue(&mut self, nth: usize) {
        if let End::Host(_) = self.ends[nth] {
            let issue = self.run.assembly.host_of(self.ends[nth]).cpu.issue;
            self.script.push(Step::Wait(issue));
        }
    }

    /// What a target takes to see what has landed: a processor's poll.
    fn seen(&mut self, nth: usize) {
        if let End::Host(_) = self.ends[nth] {
            let poll = self.run.assembly.host_of(self.ends[nth]).cpu.poll;
            self.script.push(Step::Wait(poll));
        }
    }

    /// Puts a gate before the steps of a script from `from` on, and its end behind them, where the device that takes up
    /// the jobs shapes: they count for `bytes`.
    fn admit(&mut self, script: &mut Script, from: usize, bytes: u64) {
        let Some(device) = self.shaping else { return };
        self.run.admit(device, (self.spec, self.queue), script, (from, bytes));
        script.extend(self.run.shaping_gate(device).map(Step::Leave));
    }

    /// Moves bytes by steps that `step` gives for an address and a number of them. A device that shapes takes them up
    /// in pieces, so that others' come in between.
    fn moving(&mut self, bytes: u64, step: impl Fn(u64, u64) -> Step) {
        let Some(device) = self.shaping else { return self.script.push(step(0, bytes)) };
        let piece = self.run.piece(device, self.spec).min(bytes);
        let (count, rest) = (bytes / piece, bytes % piece);
        let mut gated = |at, bytes| {
            let mut script = vec![step(at, bytes)];
            self.admit(&mut script, 0, bytes);
            script
        };
        let (one, last) = (gated(0, piece), (rest > 0).then(|| gated(count * piece, rest)));
        if count == 1 && last.is_none() {
            return self.script.extend(one);
        }
        let each = Step::Each(self.run.assembly.world.add_script(one), count, piece);
        match last {
            None => self.script.push(each),
            Some(last) => self.all(vec![vec![each], last]),
        }
    }

    /// A message of a queue pair: bytes that move, and the pair's next message begins after what one costs the device
    /// besides. What it has sent till then is requests, which take no time, or all bytes of a write, as long as these take
    /// alone. Messages are under way beside each other.
    fn message(&mut self, bytes: u64, step: impl Fn(u64, u64) -> Step) {
        let from = self.script.len();
        self.moving(bytes, step);
        let message = match self.ends.first() {
            Some(End::Device(id)) => self.run.assembly.message(*id),
            _ => Time::ZERO,
        };
        if message == Time::ZERO {
            return;
        }
        let moved = self.script.split_off(from);
        let stride = bytes.next_multiple_of(64);
        let (span, random) = (self.spec.span.max(stride), self.spec.random);
        let addresses = Addresses { base: 0, stride, span, random };
        let world = &mut self.run.assembly.world;
        let sent = match self.spec.kind {
            FlowKind::Write { .. } => cost::alone(world, addresses, &moved).0,
            _ => 0.0,
        };
        let [turn, pair] = [(); 2].map(|()| world.add_resource(1));
        let used = Step::Use(pair, message + Time::from_ps(sent as u64));
        self.script.push(Step::Take(turn));
        self.all(vec![moved, vec![used, Step::Give(turn)]]);
    }

    pub(super) fn write_script(&mut self, medium: Option<ResourceId>) -> Result<(), Failed> {
        let (spec, size) = (self.spec, self.spec.size);
        match &spec.kind {
            FlowKind::Write { .. } => {
                let (source, route) = (self.source_towards(0, 1)?, self.route(0, 1)?);
                self.spend(0, [0, size]);
                self.issue(0);
                let (stream, until) = (source.stream, Until::Landed);
                self.message(size, |address, bytes| Step::Write {
                    stream,
                    route,
                    address,
                    bytes,
                    until,
                });
            }
            FlowKind::Read { .. } => {
                let (source, route) = (self.source_towards(0, 1)?, self.route(0, 1)?);
                self.spend(0, [size, 0]);
                self.issue(0);
                let stream = source.stream;
                self.message(size, |address, bytes| Step::Read { stream, route, address, bytes });
                // As of a step that loads. CXL memory is cached, not read into a register.
                if !self.is_cxl(1) {
                    self.issue(0);
                }
            }
            FlowKind::Copy { .. } => {
                self.refuse_half_a_copy([0, 1, 2])?;
                let source = self.source_towards(0, 1)?;
                let (from, to) = (self.route(0, 1)?, self.route(0, 2)?);
                self.spend(0, [size; 2]);
                let (stream, until) = (source.stream, Until::Landed);
                self.message(size, |at, bytes| Step::Copy {
                    stream,
                    from,
                    source: at,
                    to,
                    target: at,
                    bytes,
                    until,
                });
            }
            FlowKind::Request { request, service, .. } => {
                let (one, other) = (self.source(0)?, self.source(1)?);
                let (there, back) = (self.route(0, 1)?, self.route(1, 0)?);
                self.spend(0, [0, *request]);
                self.issue(0);
                self.write(one, there, *request, Until::Landed);
                self.seen(1);
                self.serve(None, service);
                self.spend(1, [0, size]);
                self.issue(1);
                self.write(other, back, size, Until::Landed);
                self.seen(0);
            }
            FlowKind::AllReduce { reduce, step, .. } => return self.all_reduce(*reduce, *step),
            FlowKind::Ring { input, output, .. } => {
                return self.write_ring(medium, (*input, *output), size);
            }
            FlowKind::Steps { steps } => {
                let mut nth = 0;
                self.script = self.steps(steps, &mut nth)?;
                return Ok(());
            }
        }
        Ok(())
    }

    /// A processor has one stream for CXL memory, and another for all else: its copy uses the same for both its ends.
    fn refuse_half_a_copy(&self, [by, from, to]: [usize; 3]) -> Result<(), Failed> {
        if !matches!(self.ends[by], End::Host(_)) || self.is_cxl(from) == self.is_cxl(to) {
            return Ok(());
        }
        let span = self.spec.places.ends.get(to).cloned().unwrap_or(0..0);
        let what =
            "a processor's copy between CXL memory and other parts is not modelled".to_owned();
        let allowed = "write a flow of kind `read` or `write` for each of them".to_owned();
        Err(Failed::Wrong(Problem { span, what, allowed }))
    }

    fn is_cxl(&self, nth: usize) -> bool {
        matches!(self.ends[nth], End::Cxl(_))
    }

    /// The stream of an end's channel towards another, made when it is first asked for.
    fn channel(&mut self, nth: usize, to: usize, channel: &str) -> Result<Source, Failed> {
        let key = (self.ends[nth], self.is_cxl(to), channel.to_owned());
        if let Some(source) = self.sources.get(&key) {
            return Ok(*source);
        }
        let source = self.source_towards(nth, to)?;
        self.sources.insert(key, source);
        Ok(source)
    }

    /// The script of steps; `nth` is the first of their ends, and then the first of what follows.
    fn steps(&mut self, steps: &[StepSpec], nth: &mut usize) -> Result<Script, Failed> {
        let outer = std::mem::take(&mut self.script);
        for step in steps {
            self.step(step, nth)?;
        }
        Ok(std::mem::replace(&mut self.script, outer))
    }

    fn step(&mut self, step: &StepSpec, nth: &mut usize) -> Result<(), Failed> {
        let first = *nth;
        *nth += step.ends().len();
        match step {
            StepSpec::Wait(span) => self.serve(None, span),
            StepSpec::Use(unit, span) => {
                let unit = self.run.unit(unit);
                self.serve(Some(unit), span);
            }
            StepSpec::Hold(unit, steps) => {
                let unit = self.run.unit(unit);
                let inner = self.steps(steps, nth)?;
                self.script.push(Step::Take(unit));
                self.script.extend(inner);
                self.script.push(Step::Give(unit));
            }
            StepSpec::Admitted(gate, admitted, steps) => {
                let gate = self.run.gate(gate);
                let inner = self.steps(steps, nth)?;
                self.script.push(Step::Enter(gate, *admitted));
                self.script.extend(inner);
                self.script.push(Step::Leave(gate));
            }
            StepSpec::Each { count, apart, steps } => {
                let inner = self.steps(steps, nth)?;
                let script = self.run.assembly.world.add_script(inner);
                self.script.push(Step::Each(script, *count, *apart));
            }
            StepSpec::Together(lists) => {
                let lists = lists.iter().map(|steps| self.steps(steps, nth));
                let lists = lists.collect::<Result<Vec<_>, _>>()?;
                self.all(lists);
            }
            StepSpec::Move(moved) => self.moves(moved, first)?,
        }
        Ok(())
    }

    /// A step of scripts side by side.
    fn all(&mut self, scripts: Vec<Script>) {
        let count = scripts.len() as u32;
        let world = &mut self.run.assembly.world;
        let ids: Vec<ScriptId> =
            scripts.into_iter().map(|script| world.add_script(script)).collect();
        self.script.extend(ids.first().map(|first| Step::All(*first, count)));
    }

    /// A ring all-reduce. Each of as many chunks as there are members goes round the ring, from a member of its
    /// own on: to the last member it is added up, then all get the sum. Chunks wait for each other only where
    /// they use the same.
    fn all_reduce(&mut self, reduce: Option<u64>, step: Time) -> Result<(), Failed> {
        let count = self.ends.len();
        let bytes = self.spec.size.div_ceil(count as u64).max(1);
        let adding = reduce.map_or(0, |rate| {
            (u128::from(bytes) * 1_000_000_000_000 / u128::from(rate)).min(u128::from(u64::MAX / 4))
                as u64
        });
        let mut hops = Vec::new();
        for nth in 0..count {
            if !matches!(self.ends[nth], End::Device(_)) {
                let span = self.spec.places.ends.get(nth).cloned().unwrap_or(0..0);
                let what = format!("`{}` is no device", self.run.assembly.end_name(self.ends[nth]));
                let allowed = "the members of an all-reduce are devices, HOST/DEVICE".to_owned();
                return Err(Failed::Wrong(Problem { span, what, allowed }));
            }
            let source = self.channel(nth, (nth + 1) % count, "")?;
            let limits = self.run.metered(self.ends[nth], [0, bytes]);
            hops.push((source.stream, self.route(nth, (nth + 1) % count)?, limits));
        }
        let until = Until::Landed;
        let chunk = |first: usize| {
            let mut script = Script::new();
            for hop in 0..2 * (count - 1) {
                let (stream, route, limits) = &hops[(first + hop) % count];
                let (stream, route) = (*stream, *route);
                let address = bytes * first as u64;
                if step > Time::ZERO {
                    script.push(Step::Wait(step));
                }
                script.extend(limits);
                script.push(Step::Write { stream, route, address, bytes, until });
                if adding > 0 && hop < count - 1 {
                    script.push(Step::Wait(Time::from_ps(adding)));
                }
            }
            script
        };
        self.all((0..count).map(chunk).collect());
        Ok(())
    }

    fn moves(&mut self, moved: &Move, first: usize) -> Result<(), Failed> {
        let Move { how, at, bytes, channel, until, .. } = moved;
        if *how == MoveKind::Copy {
            self.refuse_half_a_copy([first, first + 1, first + 2])?;
        }
        let source = self.channel(first, first + 1, channel)?;
        let (until, bytes, at, cached) = (*until, *bytes, *at, self.is_cxl(first + 1));
        let (stream, route) = (source.stream, self.route(first, first + 1)?);
        self.spend(
            first,
            match how {
                MoveKind::Write | MoveKind::Store => [0, bytes],
                MoveKind::Read | MoveKind::Load => [bytes, 0],
                MoveKind::Copy => [bytes; 2],
            },
        );
        match how {
            MoveKind::Write => {
                self.script.push(Step::Write { stream, route, address: at, bytes, until })
            }
            MoveKind::Read => self.script.push(Step::Read { stream, route, address: at, bytes }),
            MoveKind::Store => {
                self.issue(first);
                self.script.push(Step::Write { stream, route, address: at, bytes, until });
                if until == Until::Landed && !cached {
                    self.seen(first + 1);
                }
            }
            MoveKind::Load => {
                self.issue(first);
                self.script.push(Step::Read { stream, route, address: at, bytes });
                if !cached {
                    self.issue(first);
                }
            }
            MoveKind::Copy => {
                let (source, target, to) = (at, 0, self.route(first, first + 2)?);
                let copy = Step::Copy { stream, from: route, source, to, target, bytes, until };
                self.script.push(copy);
            }
        }
        Ok(())
    }

    /// Time that passes for a service, on a unit of a resource where there is one.
    fn serve(&mut self, unit: Option<ResourceId>, service: &Distribution) {
        let step = match (unit, self.run.distribution(service)) {
            (None, None) => Step::Wait(service.mean()),
            (None, Some(drawn)) => Step::WaitRandom(drawn),
            (Some(unit), None) => Step::Use(unit, service.mean()),
            (Some(unit), Some(drawn)) => Step::UseRandom(unit, drawn),
        };
        self.script.push(step);
    }

    /// The same for a job of a device that so many bytes go into, and come out of: where its functions share it, a message
    /// that waits for its turn.
    fn serve_ring(
        &mut self,
        medium: Option<ResourceId>,
        service: &Distribution,
        [ingress, egress]: [u64; 2],
    ) {
        let tenant = self.run.engine_tenants.get(&self.ends[1]).copied();
        let (Some(medium), Some(tenant)) = (medium, tenant) else {
            return self.serve(medium, service);
        };
        let of = Admitted { tenant, queue: self.queue, ingress, egress, cost: service.mean() };
        let drawn = self.run.distribution(service);
        self.script.push(Step::Work(medium, of, drawn));
    }

    /// The host in whose memory a device's queues lie, when that is not its driver's.
    fn lender(&self, queues_in: QueuesIn) -> Option<End> {
        let End::Device(id) = self.ends[1] else { return None };
        let lender = End::Host(self.run.assembly.topology().component(id).host?);
        (queues_in == QueuesIn::Lender && lender != self.ends[0]).then_some(lender)
    }

    fn route_to(&mut self, from: usize, to: End) -> Result<RouteId, Failed> {
        let route = self.run.assembly.route(self.ends[from], to);
        let route = route.map_err(|error| misfit(self.spec, from, &error))?;
        self.routes.push(route);
        Ok(route)
    }

    /// The jobs of the trace that one queue of the flow does; none where there is no trace.
    pub(super) fn write_trace(
        &mut self,
        medium: Option<ResourceId>,
        queue: u32,
    ) -> Result<Vec<TracedJob>, Failed> {
        let spec = self.spec;
        let mut scripts: BTreeMap<(bool, u64), ScriptId> = BTreeMap::new();
        let mut jobs = Vec::new();
        for io in spec.traced(queue) {
            let script = match scripts.get(&(io.write, io.bytes)) {
                Some(script) => *script,
                None => {
                    let moved = if io.write { (io.bytes, 0) } else { (0, io.bytes) };
                    self.write_ring(medium, moved, io.bytes)?;
                    let script = std::mem::take(&mut self.script);
                    let script = self.run.assembly.world.add_script(script);
                    scripts.insert((io.write, io.bytes), script);
                    script
                }
            };
            jobs.push(TracedJob { at: io.at, script, bytes: io.bytes });
        }
        self.routes.clear();
        Ok(jobs)
    }

    /// A device's job that moves so many bytes to it and from it, and counts for so many.
    fn write_ring(
        &mut self,
        medium: Option<ResourceId>,
        (input, output): (u64, u64),
        counts: u64,
    ) -> Result<(), Failed> {
        let spec = self.spec;
        let FlowKind::Ring { descriptor, service, interrupt, queues_in, .. } = &spec.kind else {
            return Ok(());
        };
        let (driver, device) = (self.channel(0, 1, "")?, self.channel(1, 0, "")?);
        let (there, back) = (self.route(0, 1)?, self.route(1, 0)?);
        self.issue(0);
        let mut queues = back;
        if let Some(lender) = self.lender(*queues_in) {
            // The driver writes the descriptor where the queue is; the doorbell goes behind it.
            let route = self.route_to(0, lender)?;
            self.write(driver, route, *descriptor, Until::Begun);
            queues = self.route_to(1, lender)?;
        }
        self.write(driver, there, SIGNAL, Until::Landed);
        self.spend(1, [input, output]);
        let from = self.script.len();
        self.read(device, queues, *descriptor);
        if input > 0 {
            self.read(device, back, input);
        }
        self.serve_ring(medium, service, [input, output]);
        if output > 0 {
            self.write(device, back, output, Until::Begun);
        }
        self.write(device, back, COMPLETION, Until::Begun);
        self.write(device, back, SIGNAL, Until::Landed);
        let mut script = std::mem::take(&mut self.script);
        self.admit(&mut script, from, counts);
        self.script = script;
        match interrupt {
            true => {
                let interrupt = self.run.assembly.host_of(self.ends[0]).cpu.interrupt;
                self.script.push(Step::Wait(interrupt));
            }
            false => self.seen(0),
        }
        Ok(())
    }
}
