//! What changes after a plan is loaded: its kernels, and what the library runs for its products.

use infernum_codegen::cuda::Cubin;
use infernum_codegen::{Asks, Plan, Run};
use infernum_ir::Dims;

use super::blas::Shape;
use super::code::Code;
use super::exec::{Core, CudaExecutor};
use super::frame::shape;
use super::graphs::{self, Graphs};
use crate::exec::{ExecError, LoadError, TunedProduct};

impl CudaExecutor {
    /// Runs other kernels from now on: `plan` must be what it runs already, but for those.
    pub fn retarget(&mut self, plan: Plan, cubins: &[Cubin]) -> Result<(), LoadError> {
        let core = &mut self.core;
        let same = (plan.limits, &plan.weights, &plan.states, plan.arena_bytes)
            == (core.plan.limits, &core.plan.weights, &core.plan.states, core.plan.arena_bytes);
        if !same {
            return Err(LoadError::Plan("it is for another model than the one loaded".to_owned()));
        }
        core.gpu.bind()?;
        core.stream.synchronize()?;
        let code = Code::load(&plan, cubins, &core.gpu)?;
        self.graphs = Graphs::default();
        (core.device, core.functions, core.scratch) = (code.device, code.functions, code.scratch);
        core.plan = plan;
        Ok(())
    }

    /// See [`PlanExecutor::tune_products`](crate::exec::PlanExecutor::tune_products).
    pub(super) fn compete_for_products(&mut self) -> Result<Vec<TunedProduct>, ExecError> {
        let core = &mut self.core;
        core.gpu.bind()?;
        // Zeros are multiplied faster than numbers are.
        core.stream.fill(core.arena_start(), 0x3c, core.plan.arena_bytes as usize)?;
        let mut tuned = Vec::new();
        // Steps with adapters multiply what others do, and may do so in more launches.
        let sizes = core.sizes().into_iter().flat_map(|size| [(size, false), (size, true)]);
        for ((tokens, decode_only), adapted) in sizes {
            let asks = Asks { greedy: false, adapted };
            let found = core.plan.schedule_for(tokens, decode_only, asks);
            let Some(schedule) = found else { continue };
            let limits = core.plan.limits;
            let dims = Dims {
                t: tokens,
                b: tokens.min(limits.b),
                seqs: tokens.min(limits.seqs),
                ..limits
            };
            core.compete(schedule, &dims, &mut tuned)?;
        }
        self.graphs = Graphs::default(); // recorded with what was run before
        Ok(tuned)
    }
}

impl Core {
    /// Steps of every size that is recorded, or that a class of products ends with.
    fn sizes(&self) -> Vec<(u64, bool)> {
        let limits = self.plan.limits;
        let decodes =
            (1..=limits.seqs).filter_map(|n| graphs::rounded(n, limits.seqs.min(limits.t)));
        let one = |m: u64| Shape::of_rows(m).class().m.min(limits.t);
        let prompts = (1..=limits.t).map(one);
        let mut all: Vec<_> =
            decodes.map(|n| (n, true)).chain(prompts.map(|n| (n, false))).collect();
        all.dedup();
        // The largest of a class speaks for it.
        all.reverse();
        all
    }

    fn compete(
        &self,
        schedule: usize,
        dims: &Dims,
        tuned: &mut Vec<TunedProduct>,
    ) -> Result<(), ExecError> {
        let Some(blas) = &self.blas else { return Ok(()) };
        for call in &self.plan.schedules[schedule].calls {
            let frame = self.frame(call);
            for launch in &frame.program.launches {
                let Some(Run::Matmul(m)) = &launch.run else { continue };
                let (shape, places) = frame.matmul(launch, m, dims).map_err(ExecError::Inputs)?;
                let times = blas.tune(&self.gpu, &self.stream, shape, places)?;
                let Some((first_us, best_us)) = times else { continue };
                let shape = [shape.m, shape.n, shape.k];
                tuned.push(TunedProduct { shape, first_us, best_us });
            }
        }
        Ok(())
    }

    /// Has libraries choose what they do for every product of a step.
    pub(super) fn prepare(&self, schedule: usize, dims: &Dims) -> Result<(), ExecError> {
        for call in &self.plan.schedules[schedule].calls {
            for launch in &self.plan.programs[call.program as usize].launches {
                if let Some(Run::Matmul(m)) = &launch.run {
                    let shape = shape(launch, m, dims).map_err(ExecError::Inputs)?;
                    self.blas.as_ref().map_or(Ok(()), |blas| blas.prepare(shape))?;
                }
            }
        }
        Ok(())
    }
}
