#include "program.hpp"

namespace qt {

void Program::run(const Step& step, index_t begin, index_t end) {
  list_.clear();
  for (index_t i = begin; i < end; ++i) list_.push_back(ops_[i]->prepare(step));
  pool().run(list_.data(), index_t(list_.size()));
}

void Program::reserve(index_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes <= scratch_bytes_) return;
  scratch_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
  scratch_bytes_ = bytes;
}

}  // namespace qt

QT_EXPORT qt::Program* qt_program_new() { return new qt::Program; }

QT_EXPORT void qt_program_delete(qt::Program* program) { delete program; }

// How many operations there are: recorded between two calls, a part of the program can be run alone.
QT_EXPORT index_t qt_program_size(const qt::Program* program) { return program->size(); }

QT_EXPORT void qt_program_run(qt::Program* program, const qt::Step* step, index_t begin, index_t end) {
  program->run(*step, begin, end);
}
