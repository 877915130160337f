//! Launches in parts: generated rows and prompt rows of a step, each on the variant that is best for them.

use super::attach::Attach;
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
        (template.parts && !bucket.decode && most > 1 && launch.has_parts())
            .then_some([Bucket { min: 1, max: most, decode: true }, Bucket { min: 1, ..bucket }])
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
            && generated.name != prompt.name
        {
            let [decode, rest] = parts;
            let generated = self.launch_as(generated, launch, decode, &template, shown)?;
            let prompt = self.launch_as(prompt, launch, rest, &template, shown)?;
            if let (Run::Kernel(generated), Run::Kernel(prompt)) = (generated, prompt) {
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
