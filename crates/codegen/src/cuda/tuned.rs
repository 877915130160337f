//! Which variants launches run, where something other than their order says so.

use std::collections::BTreeMap;
use std::fmt;

use infernum_ir::Dims;
use infernum_passes::Bucket;

use super::attach::{Attach, within};
use super::{CudaError, Device, Library};
use crate::plan::{Kernel, Launch, Plan};

/// What a variant is chosen for: calls of an op on operands of these types, in the steps of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    /// The op.
    pub op: String,
    /// The operands' types in IR text, `_` for one that is left out.
    pub operands: Vec<String>,
    /// The steps; a bucket without end is that of the largest steps there are, whatever the plan's limits.
    pub steps: Bucket,
}

/// Variants by site, and by whom they were chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// The file that they are of.
    pub source: String,
    /// A variant's name for each site.
    pub sites: BTreeMap<Site, String>,
}

/// Variants that go before others, wherever they are admitted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunedVariants {
    /// By template, at every site.
    templates: BTreeMap<String, String>,
    /// Those of the first go before those of the next.
    chosen: Vec<Chosen>,
}

/// Which variants the launches of a plan run, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    /// Each site's.
    pub made: Vec<Made>,
    /// What was chosen for a site once and fits it no longer.
    pub dropped: Vec<Dropped>,
}

/// What a site's launches run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The site.
    pub site: Site,
    /// The variant.
    pub variant: String,
    /// The file that says so; `None` where it is the first that is admitted.
    pub source: Option<String>,
}

/// A choice that is not followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The file that it is of.
    pub source: String,
    /// The site.
    pub site: Site,
    /// The variant, and why it is none.
    pub reason: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}) for {}", self.op, self.operands.join(", "), self.steps)
    }
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = self.source.as_deref().unwrap_or("the first that is admitted");
        write!(f, "{}: {} ({source})", self.site, self.variant)
    }
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.source, self.site, self.reason)
    }
}

impl Site {
    /// That of a launch.
    pub fn of(launch: &Launch, steps: Bucket) -> Site {
        let types =
            launch.operands.iter().map(|v| v.as_ref().map_or("_".to_owned(), |v| v.ty.to_string()));
        Site { op: launch.op.clone(), operands: types.collect(), steps }
    }

    fn is_of_same_calls(&self, other: &Site) -> bool {
        (&self.op, &self.operands) == (&other.op, &other.operands)
    }
}

impl Chosen {
    /// The variant for a site in a plan of these limits: of what was chosen for the same steps, as far as the
    /// plan has them, the narrowest.
    fn variant(&self, site: &Site, limits: &Dims) -> Option<(&Site, &str)> {
        let first = Site { steps: Bucket { min: 0, max: 0, decode: false }, ..site.clone() };
        let all = self.sites.range(first..).take_while(|(known, _)| known.is_of_same_calls(site));
        let fits = all.filter(|(known, _)| within(known.steps, limits) == site.steps);
        fits.min_by_key(|(known, _)| known.steps.width()).map(|(known, v)| (known, v.as_str()))
    }
}

/// A variant that is wanted for a launch.
pub(super) struct Wanted {
    pub(super) variant: String,
    /// The file that wants it, and the site that it names; `None` for what is wanted everywhere.
    pub(super) by: Option<(String, Site)>,
}

impl TunedVariants {
    /// One variant of a template, at every site.
    pub fn everywhere(template: &str, variant: &str) -> TunedVariants {
        let templates = [(template.to_owned(), variant.to_owned())].into();
        TunedVariants { templates, chosen: Vec::new() }
    }

    /// Those of several files, of which the first go before the others.
    pub fn of(chosen: Vec<Chosen>) -> TunedVariants {
        TunedVariants { templates: BTreeMap::new(), chosen }
    }

    /// The same, with other choices before all of them.
    #[must_use]
    pub fn with_first(&self, first: Chosen) -> TunedVariants {
        let chosen = std::iter::once(first).chain(self.chosen.iter().cloned()).collect();
        TunedVariants { templates: self.templates.clone(), chosen }
    }

    /// The variants that are wanted for a launch, the most wanted first.
    pub(super) fn wanted(
        &self,
        launch: &Launch,
        bucket: Bucket,
        limits: &Dims,
        template: &str,
    ) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        if self.chosen.iter().any(|c| !c.sites.is_empty()) {
            let site = Site::of(launch, bucket);
            for chosen in &self.chosen {
                if let Some((site, variant)) = chosen.variant(&site, limits) {
                    let by = Some((chosen.source.clone(), site.clone()));
                    wanted.push(Wanted { variant: variant.to_owned(), by });
                }
            }
        }
        let everywhere = self.templates.get(template);
        wanted.extend(everywhere.map(|v| Wanted { variant: v.clone(), by: None }));
        wanted
    }
}

/// A site of a plan, and what it could run.
#[derive(Clone, Debug)]
pub struct Rivals {
    /// The site.
    pub site: Site,
    /// Its steps, within the plan's limits.
    steps: Bucket,
    /// Names of the variants that are admitted, in their order of preference.
    pub variants: Vec<String>,
    /// Of those that are admitted but cannot be launched: why.
    pub refused: Vec<String>,
}

impl Rivals {
    /// The variant that runs there; `None` where none does, as rows that are launched apart have sites of their own.
    pub fn running<'c>(&self, choices: &'c Choices) -> Option<&'c str> {
        let here =
            |made: &&Made| made.site.is_of_same_calls(&self.site) && made.site.steps == self.steps;
        choices.made.iter().find(here).map(|made| made.variant.as_str())
    }
}

/// The sites of one schedule of a plan, with what could run there, and the kernels of all of it; the plan may have
/// kernels already. A bucket of steps that the plan has none of has no sites.
pub fn rivals(
    plan: &Plan,
    schedule: usize,
    ops: &infernum_ir::OpSet,
    library: &Library,
    device: &Device,
) -> Result<(Vec<Rivals>, Vec<Kernel>), CudaError> {
    let mut attach = Attach::new(ops, library, device, plan.limits, TunedVariants::default());
    let mut found: Vec<Rivals> = Vec::new();
    let Some(schedule) = plan.schedules.get(schedule) else { return Ok((found, Vec::new())) };
    let bucket = within(schedule.bucket, &plan.limits);
    // One that ends where the plan does goes on in a larger plan.
    let open = schedule.bucket.max >= plan.limits.t;
    let whole =
        Bucket { max: if open { u64::MAX } else { schedule.bucket.max }, ..schedule.bucket };
    if bucket.min > bucket.max {
        return Ok((found, Vec::new()));
    }
    for call in &schedule.calls {
        for launch in &plan.programs[call.program as usize].launches {
            let template = attach.template(launch, &launch.name)?;
            let mut kinds = vec![(bucket, whole)];
            if let Some(parts) = attach.parts(launch, bucket, &template) {
                kinds.extend(parts.into_iter().zip(parts_of(whole)));
            }
            for (bucket, steps) in kinds {
                let site = Site::of(launch, steps);
                if found.iter().any(|known| known.site == site) {
                    continue;
                }
                let (mut variants, mut refused) = (Vec::new(), Vec::new());
                let admitted = attach.admitted(launch, bucket, &template)?;
                for variant in admitted {
                    match attach.launch_as(variant, launch, bucket, &template, &launch.name) {
                        Ok(_) => variants.push(variant.name.clone()),
                        Err(error) => refused.push(error.to_string()),
                    }
                }
                found.push(Rivals { site, steps: bucket, variants, refused });
            }
        }
    }
    Ok((found, attach.into_kernels()))
}

/// What the generated rows and the prompt rows of a bucket's steps are, each seen as a step.
pub(super) fn parts_of(bucket: Bucket) -> [Bucket; 2] {
    [Bucket { min: 1, decode: true, ..bucket }, Bucket { min: 1, ..bucket }]
}

#[cfg(test)]
mod tests;
