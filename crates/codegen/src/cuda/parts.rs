//! Launches in parts: generated rows and prompt rows of a step, each on the variant that is best for them.

use super::attach::Attach;
use super::tuned::parts_of;
use super::{CudaError, Template, Variant};
use crate::Bucket;
use crate::plan::{Launch, Run};

impl Attach<'_> {
    /// What the generated rows and the prompt rows of a bucket's steps are, each seen as a step, where a launch
    /// may run them apart and there are steps that have both.
    pub(super) fn parts(
        &self,
        launch: &Launch,
        bucket: Bucket,
        template: &Template,
    ) -> Option<[Bucket; 2]> {
        let most = bucket.max.min(self.limits.seqs);
        let [generated, prompt] = parts_of(bucket);
        (template.parts && !bucket.decode && most > 1 && launch.has_parts())
            .then_some([Bucket { max: most, ..generated }, prompt])
    }

    /// As [`Attach::launch`], in parts where these run on different variants.
    pub(super) fn launch_in_parts(
        &mut self,
        launch: &Launch,
        bucket: Bucket,
        shown: &str,
    ) -> Result<Run, CudaError> {
        let template = self.template(launch, shown)?;
        let Some(parts) = self.parts(launch, bucket, &template) else {
            return self.launch(launch, bucket, shown);
        };
        let [generated, prompt] = parts.map(|part| self.choose(launch, part, &template, shown));
        if let (Ok(generated), Ok(prompt)) = (generated?, prompt?)
            && generated.variant.name != prompt.variant.name
        {
            let [decode, rest] = parts;
            let runs = [
                self.launch_as(generated.variant, launch, decode, &template, shown)?,
                self.launch_as(prompt.variant, launch, rest, &template, shown)?,
            ];
            if let [Run::Kernel(own), Run::Kernel(others)] = runs {
                self.tell(launch, decode, &generated);
                self.tell(launch, rest, &prompt);
                let (generated, prompt) = (own, others);
                return Ok(Run::Parts { generated: generated.into(), prompt: prompt.into() });
            }
        }
        self.launch(launch, bucket, shown)
    }

    /// The variants that a launch could run in the steps of a bucket, in order.
    pub(super) fn admitted<'t>(
        &self,
        launch: &Launch,
        bucket: Bucket,
        template: &'t Template,
    ) -> Result<Vec<&'t Variant>, CudaError> {
        let mut admitted = Vec::new();
        for variant in &template.variants {
            if self.refusal(launch, bucket, template, variant, &launch.name)?.is_none() {
                admitted.push(variant);
            }
        }
        Ok(admitted)
    }
}
