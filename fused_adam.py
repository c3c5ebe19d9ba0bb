"""Fused Adam: the same optimizer in one pass over memory.

Keras writes Adam as a dozen ops per variable, each of which reads and writes all of it; TensorFlow has one kernel that
does the lot. To its user this is a Keras optimizer like any other. `train.py` uses it; nothing else needs it.
"""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="towers")
class FusedAdam(keras.optimizers.Adam):
    """`keras.optimizers.Adam`, with its arguments, slots and results (to rounding), but a fused update.

    Sparse gradients (`tf.IndexedSlices`) and `amsgrad` have no such kernel and go Keras's way.
    """

    def update_step(self, gradient, variable, learning_rate):
        if isinstance(gradient, tf.IndexedSlices) or self.amsgrad:
            return super().update_step(gradient, variable, learning_rate)
        # A cast makes a float32 of a Python number first; Keras's powers are cast, its other constants are not.
        dtype, index = variable.dtype, self._get_variable_index(variable)
        step = tf.cast(self.iterations + 1, dtype)
        return tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].handle,
            v=self._velocities[index].handle,
            beta1_power=tf.pow(tf.cast(self.beta_1, dtype), step),
            beta2_power=tf.pow(tf.cast(self.beta_2, dtype), step),
            lr=tf.cast(learning_rate, dtype),
            beta1=tf.constant(self.beta_1, dtype),
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
        )
