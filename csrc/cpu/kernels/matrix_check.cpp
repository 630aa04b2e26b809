// Digest of AMX products, see matrix_check.hpp.
#include "matrix_check.hpp"

#include "matrix_products.hpp"

#if defined(QT_AMX)
namespace qt::QT_ISA {
namespace {

std::uint64_t digest() {
  Products<Amx> products;
  return products.digest();
}

}  // namespace

const MatrixCheck matrix_check = {digest};

}  // namespace qt::QT_ISA
#endif
