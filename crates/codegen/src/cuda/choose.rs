//! Which variant runs a launch, and why.

use infernum_passes::Bucket;

use super::attach::Attach;
use super::tuned::{Dropped, Made, Site, Wanted};
use super::{CudaError, Template, Variant};
use crate::plan::Launch;

/// A variant for a launch.
pub(super) struct Choice<'t> {
    pub(super) variant: &'t Variant,
    /// The file that says so; `None` where it is the first that is admitted.
    source: Option<String>,
}

impl Attach<'_> {
    /// The first variant that is admitted, or the one that was tuned; or why there is none.
    pub(super) fn choose<'t>(
        &mut self,
        launch: &Launch,
        bucket: Bucket,
        template: &'t Template,
        shown: &str,
    ) -> Result<Result<Choice<'t>, String>, CudaError> {
        let order = self.order(launch, bucket, template, shown)?;
        let may_run = |v: &&Variant| order.is_none() || v.order.as_deref() == order;
        for Wanted { variant: name, by } in
            self.tuned.wanted(launch, bucket, &self.limits, &template.name)
        {
            let reason = match template.variants.iter().find(|v| v.name == name) {
                None => Some(format!("{} has no variant `{name}`", template.path)),
                // Another order is wanted now, which nothing is wrong with.
                Some(variant) if !may_run(&variant) => continue,
                Some(variant) => {
                    let reason = self.refusal(launch, bucket, template, variant, shown)?;
                    if reason.is_none() {
                        return Ok(Ok(Choice { variant, source: by.map(|(source, _)| source) }));
                    }
                    reason
                }
            };
            let Some((reason, (source, site))) = reason.zip(by) else { continue };
            let dropped = Dropped { source, site, reason };
            if !self.choices.dropped.contains(&dropped) {
                self.choices.dropped.push(dropped);
            }
        }
        let mut reasons = Vec::new();
        for variant in template.variants.iter().filter(may_run) {
            match self.refusal(launch, bucket, template, variant, shown)? {
                Some(reason) => reasons.push(reason),
                None => return Ok(Ok(Choice { variant, source: None })),
            }
        }
        Ok(Err(reasons.join(", ")))
    }

    /// Keeps what runs a launch, and why.
    pub(super) fn tell(&mut self, launch: &Launch, steps: Bucket, choice: &Choice<'_>) {
        let site = Site::of(launch, steps);
        if self.told.insert(site.clone()) {
            let (variant, source) = (choice.variant.name.clone(), choice.source.clone());
            self.choices.made.push(Made { site, variant, source });
        }
    }
}
