// Columns of a table, joined into one matrix.
#ifndef SPARKDL_BINDINGS_COLUMNS_H_
#define SPARKDL_BINDINGS_COLUMNS_H_

#include <nanobind/nanobind.h>

namespace sparkdl::bindings {

void DefineJoinColumns(nanobind::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_COLUMNS_H_
